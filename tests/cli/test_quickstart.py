"""The README's main job for real: `hpc-rl train configs/quickstart.yaml` on 2 ranks, and what follows a run."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpc_rl.run_dir import OTHERS, RESULTS
from tests.cli.command import QUICKSTART, hpc_rl

pytestmark = pytest.mark.xdist_group("cli-quickstart")
STEPS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


@pytest.fixture(scope="module")
def first(place: Path) -> subprocess.CompletedProcess[str]:
    """The quickstart as it is, but for fewer steps and more checkpoints."""
    return hpc_rl("train", QUICKSTART, f"steps={STEPS}", "run.dir=run", "checkpoint.every=4", cwd=place)


@pytest.fixture(scope="module")
def resumed(first: subprocess.CompletedProcess[str], place: Path) -> subprocess.CompletedProcess[str]:
    """The same run as a kill after its step 6 would have left it, gone on with."""
    shutil.copytree(place / "run", place / "killed")
    shutil.rmtree(place / f"killed/checkpoints/checkpoint_{STEPS}_complete")
    for step in (7, 8):
        shutil.rmtree(place / f"killed/rollouts/step_{step:06d}")
    lines = (place / "killed/metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "killed/metrics.jsonl").write_text("".join(lines[:6]) + lines[6][:100])
    return hpc_rl("train", place / "killed/config.yaml", "run.dir=killed", "resume=auto", cwd=place)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def whole_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Every tensor, through plain h5py."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(path / "index.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return {name: value for name, value in found.items() if not name.startswith("_layout")}


def test_what_it_prints(first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""  # no warning of any library
    lines = first.stdout.splitlines()
    assert lines[0] == (
        "Model: llama 0.3 M parameters | 2 ranks: tp 1, pp 1, dp 2 | generation tp 1 | device cpu | run directory run"
    )
    assert lines[1] == "Prompts: 4096 prompts, 24576 tokens"
    step_line = r"Step (\d+) \| Loss: -?\d+\.\d{3} \| Reward: \d\.\d{3} \| KL: -?\d+\.\d{4} \| .*Seconds: \d+\.\d\d"
    steps = [re.fullmatch(step_line, line) for line in lines[2 : 2 + STEPS]]
    assert [int(match[1]) for match in steps if match] == list(range(1, STEPS + 1)), first.stdout
    assert lines[2 + STEPS] == f"Done: {STEPS} steps in run"
    assert lines[3 + STEPS].split(maxsplit=2)[2] == f"hpc-rl train run/config.yaml resume=auto steps={2 * STEPS}"
    assert len(lines) == 6 + STEPS


def test_the_run_directory(first: subprocess.CompletedProcess[str], place: Path) -> None:
    run = place / "run"
    parts = {"config.yaml", "metrics.jsonl", "checkpoints", "rollouts", "logs", "model"}
    assert {path.name for path in run.iterdir()} >= parts
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"checkpoint_4_complete", "checkpoint_8_complete"}
    assert len(list((run / "rollouts").glob("step_*/rank_*.h5"))) == 2 * STEPS
    assert (run / "logs/rank_1.log").read_text() == ""
    for step, values in enumerate(metrics(run), start=1):
        assert values["step"] == step
        assert all(math.isfinite(values[key]) for key in ("loss", "reward_mean", "kl", "step_seconds"))


def test_it_learns(first: subprocess.CompletedProcess[str], place: Path) -> None:
    rewards = [values["reward_mean"] for values in metrics(place / "run")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05, rewards


def test_a_resumed_run_says_so(resumed: subprocess.CompletedProcess[str]) -> None:
    assert resumed.returncode == 0, resumed.stderr
    assert "Resume: going on from killed/checkpoints/checkpoint_4_complete\nStep 5 |" in resumed.stdout


def test_a_resumed_run_equals_the_one_never_stopped(resumed: subprocess.CompletedProcess[str], place: Path) -> None:
    def comparable(values: dict[str, Any]) -> dict[str, Any]:
        # What a clock measured differs, and how many samples of a killed step were found in the journal.
        measured = ("seconds", "per_second", "reused_samples")
        return {name: value for name, value in values.items() if not any(part in name for part in measured)}

    expected, got = metrics(place / "run"), metrics(place / "killed")
    assert [comparable(values) for values in got] == [comparable(values) for values in expected]
    assert [values["reused_samples"] for values in got[4:]] == [512, 512, 0, 0]  # journals of 5 and 6 were there
    ours, theirs = (whole_checkpoint(place / run / "checkpoints/checkpoint_8_complete") for run in ("killed", "run"))
    assert ours.keys() == theirs.keys() and {name.split("/")[1] for name in ours} >= {"param", "exp_avg", "exp_avg_sq"}
    different = [name for name, value in ours.items() if value.tobytes() != theirs[name].tobytes()]
    assert different == []


def test_a_second_run_sets_the_first_aside(resumed: subprocess.CompletedProcess[str], place: Path) -> None:
    """Also when it is started from the first one's own config.yaml, and when a rank fails after that."""
    before = (place / "killed/metrics.jsonl").read_text()
    done = hpc_rl(
        "train", "killed/config.yaml", "steps=1", "launch.nproc=1", "data.prompts_per_step=4", "resume=none", cwd=place
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("Set aside: the run that was in killed is now in killed/previous-1")
    old = place / "killed/previous-1"
    assert (old / "metrics.jsonl").read_text() == before
    assert {path.name for path in old.iterdir()} == {*RESULTS, *OTHERS, "config.yaml", "logs"} - {"failure.json", "slices.json"}
    assert (old / "checkpoints/checkpoint_8_complete/manifest.json").is_file()
    assert [values["step"] for values in metrics(place / "killed")] == [1]
    assert [path.name for path in (place / "killed/rollouts").iterdir()] == ["step_000001"]
    assert [path.name for path in (place / "killed/checkpoints").glob("*_complete")] == ["checkpoint_1_complete"]


def test_inspect(first: subprocess.CompletedProcess[str], place: Path) -> None:
    report = json.loads(hpc_rl("inspect", "run", "--json", cwd=place).stdout)
    assert [row["step"] for row in report["checkpoints"]] == [4, 8] and len(report["rollouts"]) == STEPS
    checkpoint = "run/checkpoints/checkpoint_8_complete"
    report = json.loads(hpc_rl("inspect", checkpoint, "--verify", "--json", cwd=place).stdout)
    assert report["verified"] is True and report["ranks"] == 2
    assert {row["what"] for row in report["contents"]} >= {"actor/param", "critic/param", "actor/exp_avg"}
    report = json.loads(hpc_rl("inspect", checkpoint, "--diff", checkpoint, "--json", cwd=place).stdout)
    assert report["same"] is True
    table = hpc_rl("inspect", "run/rollouts/step_000003", cwd=place, env={"COLUMNS": "160"})
    assert table.returncode == 0 and "response" in table.stdout and "sequences" in table.stdout
    shutil.copytree(place / checkpoint, place / "damaged")
    shard = place / "damaged/shards/rank_00001.h5"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    found = hpc_rl("inspect", "damaged", "--verify", cwd=place, env={"COLUMNS": "160"})
    assert found.returncode == 1 and "rank_00001.h5" in found.stdout
    assert hpc_rl("inspect", "nowhere", cwd=place).returncode == 2


def test_a_checkpoint_of_another_vocabulary_is_refused(first: subprocess.CompletedProcess[str], place: Path) -> None:
    larger = json.loads((place / "run/model/config.json").read_text()) | {"vocab_size": 300}
    checkpoint = "run/checkpoints/checkpoint_4_complete"
    model = [f"model.config={json.dumps(larger)}", "model.path=null", "model.tokenizer=run/model"]
    done = hpc_rl("train", QUICKSTART, *model, "run.dir=new", f"resume={checkpoint}", cwd=place)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"resume = {checkpoint}: its model.embed_tokens.weight is [258, 128]" in done.stderr
    assert "= [300, 128]: resume with the model that it was saved from" in done.stderr
    assert not (place / "new").exists()


def test_a_refused_resume_leaves_the_run_as_it_was(first: subprocess.CompletedProcess[str], place: Path) -> None:
    """Or else its own config.yaml, with which one goes on, would be refused from then on."""
    files = [place / "run/config.yaml", *(place / "run/model").iterdir()]
    before = [file.read_bytes() for file in files]
    refused = [
        (["seed=1"], "order came from seed = 0"),
        (["data.max_prompt_tokens=5", "data.overlong=cut"], "the prompts have changed"),
        (["model.dtype=bfloat16"], "saved with model.dtype = float32, but this run has bfloat16: set"),
    ]
    for overrides, reason in refused:
        done = hpc_rl("train", "run/config.yaml", "resume=auto", "launch.nproc=1", *overrides, cwd=place)
        assert done.returncode == 2 and reason in done.stderr, done.stderr
        assert [file.read_bytes() for file in files] == before


def test_a_run_does_not_go_on_without_its_critic(place: Path) -> None:
    config = (QUICKSTART, "run.dir=short", "steps=1", "launch.nproc=1", "data.prompts_per_step=2", "resume=auto")
    assert hpc_rl("train", *config, "algorithm.name=grpo", "algorithm.mini_batches=1", cwd=place).returncode == 0
    done = hpc_rl("train", *config, "algorithm.mini_batches=1", cwd=place)
    assert done.returncode == 2 and "holds no critic, which algorithm.name = ppo trains: set" in done.stderr, done.stderr
