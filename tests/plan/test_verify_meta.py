"""The plan against Megatron-core's own models, at full size without weights, for every configuration in configs/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.plan.test_command import ROOT, hpc_rl

ALL = """
import json, sys
from pathlib import Path
from hpc_rl.plan.report import plan
from hpc_rl.plan.verify import verify_meta
found = {}
for path in sorted(Path("configs").glob("*.yaml")):
    job, report = plan(path, [], gpu="h200")
    found[path.name] = verify_meta(job), report["model_params"], job.layout.tp, job.layout.pp
print(json.dumps(found))
"""
PLANTED = """
import sys
from pathlib import Path
import hpc_rl.plan.verify as verify
from hpc_rl.plan.report import plan
job, _ = plan(Path("configs/ppo_8b.yaml"), [], gpu="h200")
true = verify.megatron_shard_map
def wrong(spec, layout, rank):
    from dataclasses import replace
    shard_map = true(spec, layout, rank)
    return replace(shard_map, pieces=shard_map.pieces[1:])
verify.megatron_shard_map = wrong
verify.verify_meta(job)
"""


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_configuration() -> None:
    done = python(ALL)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {path.name for path in Path(ROOT / "configs").glob("*.yaml")}
    for rows, params, tp, pp in found.values():
        assert {row["role"] for row in rows} == set(params)
        assert len({row["rank"] for row in rows}) == min(tp, 2) * min(pp, 3)
        if tp * pp == 1:  # one rank holds the whole model, and the padding of its vocabulary
            for row in rows:
                assert 0 <= row["params"] - params[row["role"]] < 64 * 8192


def test_a_difference_is_named() -> None:
    done = python(PLANTED)
    assert done.returncode == 1
    assert "rank 0, actor: the plan differs from Megatron-core's model: " in done.stderr
    assert "left uncovered" in done.stderr or "lacks" in done.stderr or "fill 0" in done.stderr


def test_command() -> None:
    report = json.loads(hpc_rl("configs/ppo_70b.yaml", "--verify-meta", "--json").stdout)
    assert [row["rank"] for row in report["verified"]] == sorted(row["rank"] for row in report["verified"])
    assert {row["role"] for row in report["verified"]} == {"actor", "critic", "reference"}
    assert report["verified"][0]["params"] == 1_201_045_504
