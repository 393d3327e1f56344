"""The loop as a whole: real vLLM, Megatron and HDF5 on forked CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.train.runs import mismatch, quickstart, same_batch_everywhere, stale, train

pytestmark = pytest.mark.xdist_group("train")

CURVES = ("loss", "reward_mean", "kl", "actor/grad_norm", "critic/grad_norm", "response_tokens_mean", "actor/entropy")


@pytest.fixture(scope="module")
def one_rank() -> list[dict[str, float]]:
    return run_ranks(1, train, quickstart(), 3)[0]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (4, {}),
        (4, {"parallel__tp": 2, "parallel__pp": 2}),
        (4, {"parallel__tp": 2, "rollout__tp": 1}),
        (4, {"parallel__tp": 4, "rollout__tp": 2}),
        (2, {"parallel__engine": "fsdp2"}),
        (3, {"parallel__engine": "fsdp2", "parallel__recompute": "full", "rollout__tp": 1}),
        (2, {"parallel__engine": "fsdp2", "rollout__tp": 2}),
        (2, {"parallel__engine": "zero2"}),
    ],
    ids=["dp4", "tp2pp2", "tp2dp2-gen-tp1", "tp4-gen-tp2", "fsdp2", "fsdp2-dp3", "fsdp2-gen-tp2", "zero2"],
)
def test_equal_curves_at_any_layout(one_rank: list[dict[str, float]], world_size: int, parallel: dict) -> None:
    for curve in run_ranks(world_size, train, quickstart(**parallel), 3):
        for step, (expected, got) in enumerate(zip(one_rank, curve, strict=True)):
            for name in CURVES:
                assert got[name] == pytest.approx(expected[name], rel=2e-4, abs=2e-5), f"{name} at step {step + 1}"


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, {}), (2, {"parallel__tp": 2}), (2, {"parallel__engine": "fsdp2"})],
    ids=["one", "tp2", "fsdp2"],
)
def test_sampler_and_trainer_agree_before_and_after_an_update(world_size: int, parallel: dict) -> None:
    for before, after in run_ranks(world_size, mismatch, quickstart(rollout__temperature=0.7, **parallel)):
        assert before < 1e-4
        assert after < 1e-4


def test_a_run_reshards_as_its_configuration_says() -> None:
    """Verification at each sync, deltas from a snapshot, plans kept in the run directory."""
    config = quickstart(
        parallel__tp=2,
        rollout__tp=1,
        reshard__verify="always",
        reshard__snapshot="host",
        actor__lr=1e-30,
        model__dtype="bfloat16",
    )
    curves = run_ranks(2, train, config, 2)
    for step in (step for curve in curves for step in curve):
        assert step["reshard/seconds_verify"] > 0
        assert step["reshard/bytes_received"] == 0, "no bf16 value changes at this learning rate"
        assert step["reshard/bytes_lower_bound"] > 0
    assert len(list(Path(config.run.dir).glob("plans/*/rank_*.json"))) == 2


def test_a_missed_sync_shows() -> None:
    (worst,) = run_ranks(1, stale, quickstart())
    assert worst > 1e-2


def test_every_rank_holds_the_same_batch() -> None:
    assert all(run_ranks(2, same_batch_everywhere, quickstart()))


GRPO = {
    "algorithm__name": "grpo",
    "algorithm__kl_placement": "loss",
    "algorithm__kl_estimator": "k3",
    "algorithm__mini_batches": 1,
    "algorithm__clip_dual": "null",
}


def test_one_step_per_rollout_needs_no_scoring_pass() -> None:
    """GRPO on the training pass's own log-probs is GRPO on those of a pass before."""
    ((fused,), (scored,)) = (
        run_ranks(1, train, quickstart(**GRPO, **extra), 3)
        for extra in ({}, {"algorithm__correction": "tis-token", "algorithm__correction_high": 1e6})
    )
    for step, (a, b) in enumerate(zip(fused, scored, strict=True)):
        for name in ("loss", "reward_mean", "kl", "actor/grad_norm", "mismatch/abs_max"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=2e-5), f"{name} at step {step + 1}"
