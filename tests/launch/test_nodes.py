"""Nodes that differ are refused, by name, on every rank."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch.nodes import ROOT, RUN_DIR, SHARED, check_nodes, code_digest, compare

NODE = {"clock_s": 1000.0, "version of torch": "2.13.0", "code of hpc_rl": "abc", RUN_DIR: SHARED}


def nodes(*changes: dict) -> list[dict]:
    return [{"node": f"n{i}", **NODE, **change} for i, change in enumerate(changes, 1)]


def test_equal_nodes() -> None:
    assert compare(nodes({}, {"clock_s": 1002.5}, {})) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version of torch": "2.11.0"}, "version of torch is 2.11.0 on n2 but 2.13.0 elsewhere"),
        ({"code of hpc_rl": "def"}, "code of hpc_rl is def on n2"),
        ({"clock_s": 1090.0}, "the clock of n2 is 90 s off"),
        ({RUN_DIR: "cannot be written to (Read-only file system)"}, "on n2 the run directory cannot be written to"),
    ],
)
def test_the_odd_node_is_named(change: dict, message: str) -> None:
    problem = compare(nodes({}, change, {}))
    assert problem is not None
    assert message in problem


def test_code_digest_sees_every_change(tmp_path: Path) -> None:
    for package in ("hpc_rl", "launch"):
        shutil.copytree(ROOT / package, tmp_path / package)
    before = code_digest(tmp_path)
    assert before == code_digest(ROOT)
    with (tmp_path / "launch/env.py").open("a") as f:
        f.write("# changed\n")
    assert code_digest(tmp_path) != before


def _check(dirs: list[str], configs: list[str]) -> str:
    import torch.distributed as dist

    from hpc_rl.errors import UserError
    from launch.env import RankInfo

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    info = RankInfo(rank, 2, 0, 1, 2, rank, "127.0.0.1", 0, "srun", ("n1", "n2"))
    try:
        check_nodes(info, configs[rank], dirs[rank])
    except UserError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    from tests.ranks import run_ranks

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run_ranks(2, _check, [a, a], ["c", "c"]) == ["", ""]
    assert list((tmp_path / "a").iterdir()) == []
    missing = str(tmp_path / "none")
    for dirs, configs, message in (
        ([a, b], ["c", "c"], "is not the one that the first node has"),
        ([missing, missing], ["c", "c"], "cannot be written to (No such file or directory)"),
        ([a, a], ["c", "d"], "configuration is"),
    ):
        told = run_ranks(2, _check, dirs, configs)
        assert told[0] == told[1]
        assert message in told[0]
