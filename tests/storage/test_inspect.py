"""What `hpc-rl inspect` shows, and that it needs no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_rl.errors import UserError
from hpc_rl.metrics.tables import render
from hpc_rl.storage.access import read_tensor
from hpc_rl.storage.files import Files
from hpc_rl.storage.inspect import diff_paths, inspect_path
from hpc_rl.storage.rollouts import RolloutWriter
from tests.storage.faulty import save
from tests.storage.layouts import Layout, component, reference
from tests.storage.test_rollouts import make_sample


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        save(path, step, Files())
    for rank in range(2):
        with RolloutWriter(path, 2, rank) as writer:
            for i in range(rank, 10, 2):
                writer.append(make_sample(i), score=float(i))
    return path


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"checkpoint_{step}_complete"


def test_a_run_lists_its_checkpoints_and_rollouts(run_dir: Path) -> None:
    report = inspect_path(run_dir, verify=True)
    assert [(row["step"], row["state"]) for row in report["checkpoints"]] == [(1, "verified"), (2, "verified")]
    assert report["rollouts"] == [{"step": 2, "files": 2}]


def test_a_checkpoint_shows_tensors_files_and_values(run_dir: Path) -> None:
    report = inspect_path(checkpoint(run_dir, 2), verify=True)
    shard_map, _ = component(Layout(num_layers=1), 0)
    shown = {row["name"]: (row["shape"], row["dtype"]) for row in report["tensors"]}
    assert {f"actor/{n}": (list(s.shape), s.dtype) for n, s in shard_map.specs.items()}.items() <= shown.items()
    assert report["verified"] and report["damage"] == [] and report["extra"] == {"step": 2}
    assert {row["what"] for row in report["contents"]} >= {"actor/param", "actor/exp_avg"}


def test_a_shard_shows_its_extents(run_dir: Path) -> None:
    reports = [inspect_path(checkpoint(run_dir, 2) / "shards" / f"rank_0000{rank}.h5", verify=True) for rank in (0, 1)]
    names = {row["name"] for report in reports for row in report["extents"]}
    assert {f"actor/{name}" for name in component(Layout(num_layers=1), 0)[0].specs} <= names
    assert all(report["verified"] for report in reports)


def test_rollouts_show_decoded_samples_with_rewards(run_dir: Path) -> None:
    report = inspect_path(run_dir / "rollouts" / "step_000002")
    assert (report["sequences"], report["score_mean"]) == (10, 4.5)
    last = make_sample(9)
    shown = report["samples"][-1]
    assert (shown["score"], shown["response"], shown["prompt"]) == (9.0, last.text, last.request.prompt.text)
    assert inspect_path(run_dir / "rollouts" / "step_000002" / "rank_00001.h5")["sequences"] == 5


def test_rollouts_can_be_looked_at_while_they_are_written(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 3, 0) as writer:
        writer.append(make_sample(1))
        assert inspect_path(tmp_path / "rollouts" / "step_000003" / "rank_00000.h5")["sequences"] == 1
        assert inspect_path(tmp_path / "rollouts" / "step_000003")["sequences"] == 1


def test_every_report_is_json_and_prints_as_tables(run_dir: Path) -> None:
    for path in (run_dir, checkpoint(run_dir, 1), run_dir / "rollouts" / "step_000002"):
        report = inspect_path(path)
        assert json.loads(json.dumps(report, allow_nan=True)) is not None
        render(report)
    render(diff_paths(checkpoint(run_dir, 1), checkpoint(run_dir, 2)))


def test_diff_finds_the_tensors_and_values_that_differ(run_dir: Path, tmp_path: Path) -> None:
    report = diff_paths(checkpoint(run_dir, 1), run_dir)
    names = {f"actor/{name}" for name in component(Layout(num_layers=1), 0)[0].specs}
    assert {row["name"] for row in report["differences"]} == names and not report["same"]
    assert {"value": "extra.step", "a": 1, "b": 2} in report["values"]
    shutil.copytree(checkpoint(run_dir, 1), tmp_path / "copy")
    assert diff_paths(checkpoint(run_dir, 1), tmp_path / "copy")["same"]


@pytest.mark.parametrize("order", ["--diff A B", "A --diff B", "A B --diff"])
def test_diff_on_the_command_line_keeps_the_order_of_its_paths(run_dir: Path, order: str) -> None:
    paths = {"A": str(checkpoint(run_dir, 1)), "B": str(checkpoint(run_dir, 2))}
    words = [paths.get(word, word) for word in order.split()]
    done = subprocess.run(
        [sys.executable, "-m", "hpc_rl.cli", "inspect", *words, "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert (report["a"], report["b"]) == (paths["A"], paths["B"])
    assert {"value": "extra.step", "a": 1, "b": 2} in report["values"]


@pytest.mark.parametrize(("words", "rule"), [(["--diff", "x"], "exactly 2 paths"), (["x", "y"], "one path")])
def test_inspect_refuses_a_wrong_number_of_paths(words: list[str], rule: str) -> None:
    done = subprocess.run([sys.executable, "-m", "hpc_rl.cli", "inspect", *words], capture_output=True, text=True)
    assert done.returncode != 0 and rule in done.stderr and "Traceback" not in done.stderr


def test_read_tensor_gives_a_tensor_or_a_box_of_it(run_dir: Path) -> None:
    shard_map, _ = component(Layout(num_layers=1), 0)
    name = "param/layers.0.down.weight"
    expected = reference(name, shard_map.specs[name], 2)
    got = read_tensor(run_dir, f"actor/{name}")
    assert got.dtype == np.float32 and np.array_equal(got, expected.float().numpy())
    raw = read_tensor(checkpoint(run_dir, 2), f"actor/{name}", ((3, 5), (7, 11)), raw=True)
    assert np.array_equal(raw.view(np.int16), expected[3:10, 5:16].view(torch.int16).numpy())
    with pytest.raises(UserError, match="no tensor actor/nothing"):
        read_tensor(run_dir, "actor/nothing")
    with pytest.raises(UserError, match="is not inside"):
        read_tensor(run_dir, f"actor/{name}", ((0, 0), (17, 1)))


@pytest.mark.parametrize("path", ["nothing", "empty", "file"])
def test_anything_else_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError) as caught:
        inspect_path(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value) and "\n" not in str(caught.value)


def test_reading_imports_no_torch(run_dir: Path) -> None:
    code = (
        "import sys\n"
        "from hpc_rl.storage import access, inspect, verify, plan, writer, finish, rollout_reader, lock, rollouts\n"
        f"assert inspect.inspect_path({str(run_dir)!r}, verify=True)['checkpoints'][0]['state'] == 'verified'\n"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_a_checkpoint_without_its_manifest_is_told_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_8_complete"
    (path / "shards").mkdir(parents=True)
    with pytest.raises(UserError, match=r"checkpoint_8_complete/manifest\.json: missing"):
        inspect_path(path)
