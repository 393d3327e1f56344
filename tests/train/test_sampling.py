"""Dynamic sampling, over-sampling, curriculum, greedy baselines and staleness in whole runs, and their exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.config import Config
from tests.ranks import RankFailed, run_ranks
from tests.train.kl import run_scored
from tests.train.runs import quickstart
from tests.train.sampling import collected, run_steps, same, step_without_a_sync, write_prompts

pytestmark = pytest.mark.xdist_group("train")

GROUPS = {"algorithm__kl_placement": "none", "algorithm__mini_batches": 1}
DAPO = {**GROUPS, "algorithm__name": "dapo", "rollout__samples_per_prompt": 2, "data__prompts_per_step": 6}


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def curriculum_config(tmp_path: Path, name: str, **values: Any) -> Config:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    return quickstart(
        **DAPO, run__dir=tmp_path / name, data__prompts=prompts, data__oversample=1.5, data__reward_min=0.1,
        data__reward_max=0.9, steps=4, checkpoint__every=2, **values,
    )  # fmt: skip


def test_refilled_and_filtered_run_resumes_bitwise(tmp_path: Path) -> None:
    (whole,) = run_ranks(1, run_steps, curriculum_config(tmp_path, "whole"), 4)
    run_ranks(1, run_steps, curriculum_config(tmp_path, "cut"), 2)
    (resumed,) = run_ranks(1, run_steps, curriculum_config(tmp_path, "cut", resume="auto"), 4)
    assert resumed["cursor"] == whole["cursor"]
    assert all(same(a, b) for a, b in zip(resumed["batches"], whole["batches"][2:], strict=True))
    assert all(torch.equal(resumed["weights"][name], value) for name, value in whole["weights"].items())
    lines = figures(tmp_path / "whole")
    assert figures(tmp_path / "cut") == lines
    assert whole["cursor"]["back_at"] and any(line["sampling/prompts_left_out"] for line in lines)
    assert any(line["sampling/rounds"] > 1 for line in lines), "nothing was refilled"
    for line, batch in zip(lines, whole["batches"], strict=True):
        assert len(batch) == 12 and batch["group_ids"].unique().tolist() == list(range(6))
        groups = batch["scores"].view(6, 2)
        assert int((groups[:, 0] == groups[:, 1]).sum()) == line["sampling/unfilled"]


def test_rounds_are_bounded(tmp_path: Path) -> None:
    """Rewards that never differ: the budget is spent, the step goes on with what there is."""
    config = quickstart(
        **DAPO, run__dir=tmp_path, steps=1, reward__function="hpc_rl.reward.functions:length_penalty",
        algorithm__refill_rounds=2, rollout__max_response_tokens=1,
    )  # fmt: skip
    (result,) = run_ranks(1, run_steps, config, 1)
    (line,) = figures(tmp_path)
    assert (line["sampling/rounds"], line["sampling/prompts_drawn"], line["sampling/unfilled"]) == (3, 18, 6)
    assert result["cursor"]["position"] == 18 and len(result["batches"][0]) == 12
    assert line["actor/grad_norm"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_remax_baseline_is_the_greedy_score_and_survives_a_kill(tmp_path: Path, world_size: int) -> None:
    config = quickstart(
        algorithm__name="remax", run__dir=tmp_path, data__prompts_per_step=12, rollout__samples_per_prompt=2
    )
    results = run_ranks(world_size, collected, config)
    for result in results:
        first, reused, again = result["batches"]
        for prompt_id, baseline in zip(first["prompt_ids"].tolist(), first["baseline_scores"].tolist(), strict=True):
            assert baseline == result["greedy"][prompt_id]
        assert len(set(first["baseline_scores"].tolist())) == 2 and int(first["sample_ids"].min()) == 0
        assert same(first, reused) and same(first, again) and same(first, results[0]["batches"][0])
        counts = [m["reused_samples"] for m in result["metrics"]]
        assert counts[0] == 0 and counts[2] == 36, "24 samples and 12 greedy ones"
        assert counts[1] == (0 if world_size == 1 else 18), "what the other rank had written"


def test_stale_weights_are_counted_and_refused() -> None:
    (metrics,) = run_ranks(1, step_without_a_sync, quickstart(**GROUPS, algorithm__max_staleness=1))
    assert metrics["off_policy_steps_mean"] == metrics["off_policy_steps_max"] == 1
    with pytest.raises(RankFailed, match="1 steps behind those of step 2, but algorithm.max_staleness = 0"):
        run_ranks(1, step_without_a_sync, quickstart(**GROUPS))


def test_oversampling_draws_as_many_more() -> None:
    """ceil(5 x 1.5) prompts for 5, in one round."""
    (result,) = run_ranks(
        1,
        run_scored,
        quickstart(**{**DAPO, "data__prompts_per_step": 5}, data__oversample=1.5, algorithm__refill_rounds=0),
        1,
    )
    (metrics,), (batch,) = result["metrics"], result["batches"]
    assert (metrics["sampling/prompts_drawn"], metrics["sampling/rounds"]) == (8, 1)
    assert len(batch) == 10 and batch["group_ids"].unique().numel() == 5


HANGING = """
import time
def judge(prompt, response, fields):
    if prompt.startswith("11+"): time.sleep(1e6)
    return float(response == fields["answer"])
"""


@pytest.mark.parametrize("on_error", ["score", "fail"])
def test_a_reward_that_hangs(on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, whose vLLM and gloo run: the hanging samples are scored and counted, or end the run."""
    (tmp_path / "my_hanging_for_test.py").write_text(HANGING)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = quickstart(
        **GROUPS, run__dir=tmp_path / "run", data__prompts=write_prompts(tmp_path / "prompts.jsonl", 6),
        data__prompts_per_step=6, rollout__samples_per_prompt=2, reward__function="my_hanging_for_test:judge",
        reward__timeout_s=0.5, reward__on_error=on_error, reward__error_score=-7,
    )  # fmt: skip
    if on_error == "fail":
        with pytest.raises(
            RankFailed, match="prompt_id 0, sample_id 0.*TimeoutError: it took longer than reward.timeout_s"
        ):
            run_ranks(2, run_scored, config, 1)
        return
    for result in run_ranks(2, run_scored, config, 1):
        assert result["reward_processes"] == (1, 0), "one of each sampling rank, which ends with the job"
        (metrics,), (batch,) = result["metrics"], result["batches"]
        assert metrics["reward_errors"] == 2
        assert ((batch["scores"] == -7) == (batch["prompt_ids"] == 0)).all()
