"""Every edge of a step's inputs: defined, finite, for each algorithm and aggregation."""

from typing import Any

import pytest
import torch

from hpc_rl.algo.step import mini_batches, prepare
from hpc_rl.batch import Batch
from tests.algo.batches import (
    AGGREGATIONS,
    NAMES,
    full_config,
    losses_and_gradients,
    make_batch,
    make_config,
    outputs_of,
    whole_step,
)

names = pytest.mark.parametrize("name", NAMES)
INF, NAN = float("inf"), float("nan")


def replaced(batch: Batch, name: str, value: float) -> Batch:
    """``name`` set to ``value`` at the response tokens."""
    return batch.with_tokens(**{name: batch[name].masked_fill(batch["response_mask"], value)})


def with_mask(batch: Batch, mask: torch.Tensor) -> Batch:
    return batch.with_tokens(response_mask=mask)


def assert_finite(results: dict[str, Any]) -> None:
    for name, value in results.items():
        assert torch.as_tensor(value).isfinite().all(), f"{name} is {value}"


def run(batch: Batch, name: str, **outputs: torch.Tensor) -> tuple[Batch, dict[str, Any]]:
    """One whole step with everything on, for every aggregation; all that comes out must be finite."""
    for aggregation in AGGREGATIONS:
        config = full_config(name, aggregation=aggregation)
        part, metrics = whole_step(batch, config)
        results = losses_and_gradients(part, config, {**outputs_of(part), **outputs})
        assert_finite(metrics | results)
        assert_finite({k: part[k] for k in ("advantages", "returns", "token_level_rewards", "loss_weights")})
    return part, metrics | results


@names
def test_no_response_tokens_at_all(name: str) -> None:
    batch = make_batch(1)
    part, results = run(with_mask(batch, torch.zeros_like(batch["response_mask"])), name)
    assert results["loss"] == 0 and (results["grad/log_probs"] == 0).all() and results["empty_frac"] == 1.0
    assert (part["advantages"] == 0).all() and (part["loss_weights"] == 0).all()


@names
def test_no_sequences(name: str) -> None:
    empty = make_batch(1).select([])
    prepared, metrics = prepare(empty, full_config(name), 0.1)
    assert_finite(metrics)
    assert prepared["advantages"].shape == (0,)
    assert list(mini_batches(prepared, full_config(name), torch.Generator())) == []


@names
def test_responses_of_one_token(name: str) -> None:
    batch = make_batch(2, num_sequences=4)
    last = torch.zeros_like(batch["response_mask"])
    last[batch.cu_seqlens[1:] - 1] = True
    last[batch.cu_seqlens[:-1]] = False  # a sequence of one token is all prompt
    run(with_mask(batch, last), name)


@names
def test_groups_of_one(name: str) -> None:
    batch = make_batch(3, empty=False).with_sequences(group_ids=torch.arange(6))
    part, _ = run(batch, name)
    if name in ("dr_grpo", "rloo", "opo", "gpg"):  # the raw outcome, penalties included
        outcomes = torch.stack([part["token_level_rewards"][part.sequence_index() == b].sum() for b in range(6)])
        expected = outcomes.repeat_interleave(part.lengths) * part["response_mask"]
        torch.testing.assert_close(part["advantages"], expected)


@names
def test_identical_rewards(name: str) -> None:
    """Group estimators then teach nothing (0 exactly), up to the KL in the reward."""
    batch = make_batch(4, empty=False)
    last = torch.zeros_like(batch["response_mask"])
    last[batch.cu_seqlens[1:] - 1] = True
    batch = with_mask(batch, last).with_tokens(token_level_scores=0.1 * last.double())
    batch = batch.with_sequences(
        scores=torch.full((6,), 0.1, dtype=torch.float64), group_ids=torch.tensor([0, 0, 0, 1, 1, 1])
    )
    run(batch, name)
    config = make_config(name, kl_placement="none")
    prepared, metrics = prepare(batch, config, 0.0)
    if config.algorithm.name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "dapo", "gspo", "cispo", "sapo"):
        assert (prepared["advantages"] == 0).all() and metrics["informative_frac"] == 0


@names
@pytest.mark.parametrize("shift", [1e3, -1e3, 1e30, -1e30])
def test_ratio_overflow(name: str, shift: float) -> None:
    batch = make_batch(5)
    log_probs = outputs_of(batch)["log_probs"] + shift
    run(batch, name, log_probs=log_probs)


@names
@pytest.mark.parametrize("array", ["rollout_log_probs", "old_log_probs", "ref_log_probs"])
def test_recorded_log_probs_of_minus_infinity(name: str, array: str) -> None:
    batch = make_batch(6)
    run(replaced(batch, array, -INF), name, log_probs=outputs_of(batch)["log_probs"])


@names
def test_all_log_probs_of_minus_infinity(name: str) -> None:
    """Both the old and the new policy rule the token out: ratio 1, no gradient."""
    batch = make_batch(7)
    for array in ("rollout_log_probs", "old_log_probs", "ref_log_probs"):
        batch = replaced(batch, array, -INF)
    _, results = run(batch, name, log_probs=torch.full((batch.num_tokens,), -INF, dtype=torch.float64))
    assert (results["grad/log_probs"] == 0).all() and results["approx_kl"] == 0


@pytest.mark.parametrize("finished", [True, False])
def test_truncation_is_reported(finished: bool) -> None:
    batch = make_batch(8).with_sequences(finished=torch.full((6,), finished))
    assert prepare(batch, make_config("ppo"), 0.0)[1]["truncated_frac"] == (0.0 if finished else 1.0)
