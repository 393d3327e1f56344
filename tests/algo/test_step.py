"""The calls of the training loop: prepare, mini_batches, policy_loss, value_loss."""

import math
from typing import Any

import pytest
import torch

from hpc_rl.algo.correction import importance_weights
from hpc_rl.algo.losses import loss_weights
from hpc_rl.algo.masked import segment_count
from hpc_rl.algo.step import mini_batches, policy_loss, prepare
from hpc_rl.batch import Batch, cumulative
from hpc_rl.errors import RunError, UserError
from tests.algo.batches import (
    AGGREGATIONS,
    MAX_RESPONSE_TOKENS,
    losses_and_gradients,
    make_batch,
    make_config,
    outputs_of,
    whole_step,
)

INF, NAN = float("inf"), float("nan")


# ---- prepare --------------------------------------------------------------------------------------------------------


def test_kl_enters_the_reward_once() -> None:
    batch = make_batch(9)
    mask = batch["response_mask"]
    kl = (batch["old_log_probs"] - batch["ref_log_probs"]) * mask
    expected = {"none": 0.0, "loss": 0.0, "reward": 0.3}
    for placement, coef in expected.items():
        prepared, metrics = prepare(batch, make_config("ppo", kl_placement=placement, kl_estimator="k1"), 0.3)
        torch.testing.assert_close(prepared["token_level_rewards"], batch["token_level_scores"] * mask - coef * kl)
        assert metrics["kl"] == pytest.approx(float(kl.sum() / mask.sum()))


def test_metrics_of_a_known_step() -> None:
    """Responses of 1 and 2 tokens, scores 1 and 3, the second one cut by the limit."""
    cu = cumulative(torch.tensor([2, 3]))
    mask = torch.tensor([False, True, False, True, True])
    zeros = torch.zeros(5)
    tokens = {"response_mask": mask, "old_log_probs": zeros, "rollout_log_probs": zeros}
    tokens |= {"token_level_scores": torch.tensor([0.0, 1.0, 0.0, 0.0, 3.0]), "values": torch.tensor([9.0, 0, 9, 1, 2])}
    sequences = {"scores": torch.tensor([1.0, 3.0]), "group_ids": torch.tensor([0, 0])}
    batch = Batch(cu, tokens, {**sequences, "finished": torch.tensor([True, False])})
    _, metrics = prepare(batch, make_config("ppo", lam=1.0, kl_placement="none", whiten_advantages=False), 0.0)
    expected = {
        "reward_mean": 2.0, "reward_std": math.sqrt(2), "response_tokens_mean": 1.5, "empty_frac": 0.0,
        "truncated_frac": 0.5, "informative_frac": 1.0, "values_mean": 1.0, "returns_mean": 7 / 3,
        "advantages_mean": 4 / 3, "explained_variance": 1 - (1 / 3) / (4 / 3), "mismatch/ess": 1.0,
    }  # fmt: skip
    assert {k: metrics[k] for k in expected} == pytest.approx(expected)
    assert "kl" not in metrics, "nobody measured it"


def test_overlong_penalty_costs_the_last_token() -> None:
    batch = make_batch(10, empty=False)
    lengths = segment_count(batch["response_mask"], batch.cu_seqlens)
    config = make_config("ppo", kl_placement="none", overlong_buffer_tokens=MAX_RESPONSE_TOKENS, overlong_penalty=2.0)
    prepared, metrics = prepare(batch, config, 0.0)
    difference = prepared["token_level_rewards"] - batch["token_level_scores"] * batch["response_mask"]
    per_sequence = -2.0 * lengths / MAX_RESPONSE_TOKENS
    for b, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        where = batch["response_mask"][start:end].nonzero().flatten()
        expected = torch.zeros(int(end - start), dtype=torch.float64)
        if len(where):
            expected[where[-1]] = per_sequence[b]
        torch.testing.assert_close(difference[start:end], expected)
    assert metrics["overlong_penalty_mean"] == pytest.approx(float(per_sequence.mean()))


def test_an_empty_response_counts_in_its_group() -> None:
    """Scores 1, 0 and, of the empty one, -1: the group's mean is 0."""
    cu = cumulative(torch.tensor([2, 2, 1]))
    mask = torch.tensor([False, True, False, True, False])
    scores = torch.tensor([1.0, 0.0, -1.0])
    tokens = {"response_mask": mask, "old_log_probs": torch.zeros(5), "rollout_log_probs": torch.zeros(5)}
    tokens["token_level_scores"] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    batch = Batch(cu, tokens, {"scores": scores, "group_ids": torch.zeros(3, dtype=torch.int64)})
    prepared, _ = prepare(batch, make_config("dr_grpo"), 0.0)
    assert prepared["advantages"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("score", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["scores", "token_level_scores"])
def test_a_reward_that_is_not_finite_stops_the_run(score: float, where: str) -> None:
    batch = make_batch(11)
    if where == "scores":
        batch = batch.with_sequences(scores=batch["scores"].index_fill(0, torch.tensor([3]), score))
    else:
        token = int((batch["response_mask"] & (batch.sequence_index() == 3)).nonzero()[0])
        values = batch["token_level_scores"].index_fill(0, torch.tensor([token]), score)
        batch = batch.with_tokens(token_level_scores=values)
    with pytest.raises(RunError, match=r"sequence 3 is (nan|-?inf).*finite"):
        prepare(batch, make_config("grpo"), 0.0)
    named = batch.with_sequences(prompt_ids=10 + torch.arange(6), sample_ids=20 + torch.arange(6))
    with pytest.raises(RunError, match=r"prompt_id 13, sample_id 23 is (nan|-?inf).*finite"):
        prepare(named, make_config("grpo"), 0.0)


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("ppo", "values", "needs a critic's values"),
        ("remax", "baseline_scores", "greedy"),
        ("grpo", "ref_log_probs", "kl_placement = loss needs ref_log_probs"),
    ],
)
def test_missing_arrays_are_named(name: str, missing: str, message: str) -> None:
    batch = make_batch(12)
    tokens = {k: v for k, v in batch.tokens.items() if k != missing}
    sequences = {k: v for k, v in batch.sequences.items() if k != missing}
    with pytest.raises(UserError, match=message):
        prepare(Batch(batch.cu_seqlens, tokens, sequences), make_config(name), 0.1)


# ---- mini-batches ---------------------------------------------------------------------------------------------------


def prepared_batch(name: str = "grpo", num_sequences: int = 7, **algorithm: Any) -> tuple[Batch, Any]:
    config = make_config(name, **algorithm)
    batch = make_batch(13, num_sequences).with_sequences(position=torch.arange(num_sequences))
    return prepare(batch, config, 0.1)[0], config


@pytest.mark.parametrize(("parts", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7), (50, [1] * 7)])
def test_mini_batches_part_each_epoch(parts: int, sizes: list[int]) -> None:
    batch, config = prepared_batch(mini_batches=parts, epochs=3)
    minis = list(mini_batches(batch, config, torch.Generator().manual_seed(0)))
    assert [len(mini) for mini in minis] == sizes * 3
    epochs = [
        torch.cat([m["position"] for m in minis[i : i + len(sizes)]]).tolist() for i in range(0, len(minis), len(sizes))
    ]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3  # shuffled anew
    for mini in minis:
        expected = batch.select(mini["position"])
        assert all(torch.equal(mini[name], expected[name]) for name in batch.tokens)


def test_mini_batches_follow_the_generator() -> None:
    batch, config = prepared_batch(mini_batches=3)
    first, second, other = (
        [m["position"].tolist() for m in mini_batches(batch, config, torch.Generator().manual_seed(seed))]
        for seed in (1, 1, 2)
    )
    assert first == second != other


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_hold_the_counts_of_the_mini_batch(aggregation: str) -> None:
    batch, config = prepared_batch(mini_batches=2, aggregation=aggregation)
    for mini in mini_batches(batch, config, torch.Generator().manual_seed(3)):
        mask = mini["response_mask"]
        expected = loss_weights(aggregation, mask, mini.cu_seqlens, MAX_RESPONSE_TOKENS, torch.float64)
        assert torch.equal(mini["loss_weights"], expected)
        assert torch.allclose(mini["value_loss_weights"], mask / mask.sum().double())


def test_rejected_tokens_leave_the_policy_loss_and_its_denominator() -> None:
    batch, config = prepared_batch(reject="token-k1", reject_low=0.9, reject_high=1.1, aggregation="token-mean")
    accepted = batch["loss_mask"]
    assert 0 < accepted.sum() < batch["response_mask"].sum()
    (mini,) = mini_batches(batch, config, torch.Generator())
    assert torch.equal(mini["loss_weights"] > 0, mini["loss_mask"])
    assert float(mini["loss_weights"].sum()) == pytest.approx(1.0)
    assert torch.equal(mini["value_loss_weights"] > 0, mini["response_mask"])


# ---- loss functions -------------------------------------------------------------------------------------------------


def test_policy_loss_is_the_sum_of_its_terms() -> None:
    config = make_config("grpo", kl_placement="loss", kl_estimator="k2", entropy_coef=0.5, kl_coef=0.2)
    part, _ = whole_step(make_batch(14), config)
    outputs = outputs_of(part)
    loss, metrics = policy_loss(config, 0.2)(outputs, part)
    weights, mask = part["loss_weights"], part["response_mask"]
    kl = (0.5 * (outputs["log_probs"] - part["ref_log_probs"]).square() * mask).sum() / mask.sum()
    entropy = (outputs["entropy"] * mask).sum() / mask.sum()
    assert float(metrics["kl_loss"]) == pytest.approx(float(kl))
    assert float(metrics["entropy"]) == pytest.approx(float(entropy))
    assert float(metrics["loss/entropy"]) == pytest.approx(-0.5 * float((weights * outputs["entropy"]).sum()))
    terms = metrics["loss/policy"] + metrics["loss/kl"] + metrics["loss/entropy"]
    assert float(loss) == pytest.approx(float(terms))


@pytest.mark.parametrize("name", ["gpg", "reinforce", "ppo", "grpo", "dapo", "gspo", "cispo", "sapo"])
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    """At ratio 1 every loss has the gradient -w A in the token's log-prob (gspo: of its sequence's share)."""
    config = make_config(name, kl_placement="none")
    part, _ = whole_step(make_batch(15), config)
    results = losses_and_gradients(part, config, {**outputs_of(part), "log_probs": part["old_log_probs"]})
    torch.testing.assert_close(results["grad/log_probs"], -part["loss_weights"] * part["advantages"])


def test_correction_weights_scale_the_policy_term_alone() -> None:
    config = make_config("grpo", correction="tis-token", kl_coef=0.3, entropy_coef=0.1)
    part, _ = whole_step(make_batch(16), config)
    outputs = outputs_of(part)
    ones = part.with_tokens(correction_weights=torch.ones_like(part["correction_weights"]))
    twos = part.with_tokens(correction_weights=2 * ones["correction_weights"])
    _, once = policy_loss(config, 0.3)(outputs, ones)
    _, twice = policy_loss(config, 0.3)(outputs, twos)
    assert float(twice["loss/policy"]) == pytest.approx(2 * float(once["loss/policy"]))
    for name in ("loss/kl", "loss/entropy", "clip_frac", "kl_loss"):
        assert twice[name] == once[name]


def test_straight_through_takes_the_gradient_of_k2() -> None:
    """KL alone in the loss: the configuration's switch reaches it, and leaves its value."""
    results = {}
    for estimator, straight_through in (("k2", False), ("k3", False), ("k3", True)):
        config = make_config("grpo", kl_estimator=estimator, kl_straight_through=straight_through, kl_coef=0.5)
        part, _ = whole_step(make_batch(17), config)
        part = part.with_tokens(advantages=torch.zeros_like(part["advantages"]))
        results[estimator, straight_through] = losses_and_gradients(part, config, outputs_of(part))
    k2, k3, both = results.values()
    assert both["loss/kl"] == k3["loss/kl"] != k2["loss/kl"]
    torch.testing.assert_close(both["grad/log_probs"], k2["grad/log_probs"])
    assert not torch.allclose(k3["grad/log_probs"], k2["grad/log_probs"])


@pytest.mark.parametrize("method", ["tis-token", "icepop-sequence"])
def test_correction_is_as_configured(method: str) -> None:
    batch = make_batch(18)
    keys = {"correction": method, "correction_low": 0.9, "correction_high": 1.1}
    plain, metrics = prepare(batch, make_config("dapo", **keys), 0.0)
    mean, _ = prepare(batch, make_config("dapo", **keys, correction_normalize=True), 0.0)
    log_ratio = (batch["old_log_probs"] - batch["rollout_log_probs"]) * batch["response_mask"]
    args = (log_ratio, batch["response_mask"], batch.cu_seqlens, method, 0.9, 1.1)
    torch.testing.assert_close(plain["correction_weights"], importance_weights(*args))
    torch.testing.assert_close(mean["correction_weights"], importance_weights(*args, normalize=True))
    assert not torch.equal(plain["correction_weights"], mean["correction_weights"])
    expected = plain["correction_weights"].sum() / batch["response_mask"].sum()
    assert metrics["correction_weight_mean"] == pytest.approx(float(expected))
