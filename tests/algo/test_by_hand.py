"""Small cases worked out by hand or from the definition, independent of the golden ones."""

import math

import pytest
import torch

from hpc_rl.algo import advantages as adv
from hpc_rl.algo import losses, masked, shaping
from hpc_rl.algo.correction import acceptance_mask, importance_weights, mismatch_metrics
from hpc_rl.algo.kl import KLController, kl_estimate
from hpc_rl.algo.losses import PolicyInputs
from hpc_rl.config import AlgorithmConfig
from tests.algo.batches import AGGREGATIONS, make_batch

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def close(actual: torch.Tensor, expected: object, tolerance: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# One sequence: prompt token, three response tokens; and one of a prompt token alone.
CU = torch.tensor([0, 4, 5])
MASK = torch.tensor([False, True, True, True, False])
NAN = float("nan")


def test_gae_three_tokens() -> None:
    advantages, returns = adv.gae(tensor(NAN, 0, 0, 1, NAN), tensor(NAN, 0.5, 0.4, 0.3, NAN), MASK, CU, 0.9, 0.8)
    # deltas, last first: 1 - 0.3 = 0.7; 0.9 * 0.3 - 0.4 = -0.13; 0.9 * 0.4 - 0.5 = -0.14; factor 0.72
    last, middle = 0.7, -0.13 + 0.72 * 0.7
    first = -0.14 + 0.72 * middle
    close(advantages, [0, first, middle, last, 0])
    close(returns, [0, first + 0.5, middle + 0.4, last + 0.3, 0])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.5, 1.0)])
def test_gae_is_its_definition(gamma: float, lam: float) -> None:
    """The double sum over tokens of the response, token by token."""
    batch = make_batch(3, num_sequences=9)
    rewards, values, mask = batch["token_level_scores"], batch["values"], batch["response_mask"]
    advantages, returns = adv.gae(rewards, values, mask, batch.cu_seqlens, gamma, lam)
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens = [i for i in range(start, end) if mask[i]]
        for t, i in enumerate(tokens):
            total = 0.0
            for k, j in enumerate(tokens[t:]):
                following = float(values[tokens[t + k + 1]]) if t + k + 1 < len(tokens) else 0.0
                total += (gamma * lam) ** k * (float(rewards[j]) + gamma * following - float(values[j]))
            assert float(advantages[i]) == pytest.approx(total, abs=1e-12)
            assert float(returns[i]) == pytest.approx(total + float(values[i]), abs=1e-12)


def test_suffix_sums_do_not_cross_sequences() -> None:
    cu = torch.tensor([0, 3, 3, 4, 9])
    close(masked.suffix_sums(torch.ones(9, dtype=F64), cu, 1.0), [3, 2, 1, 1, 5, 4, 3, 2, 1])
    close(masked.suffix_sums(torch.ones(9, dtype=F64), cu, 0.5)[4:], [1.9375, 1.875, 1.75, 1.5, 1])
    close(masked.suffix_sums(torch.ones(9, dtype=F64), cu, 0.0), [1.0] * 9)


def test_group_estimators() -> None:
    outcomes, groups = tensor(1, 0, 2, 5), torch.tensor([7, 7, 7, 9])  # group 7: mean 1, std 1; group 9 is alone
    close(adv.grpo(outcomes, groups), [0, -1 / (1 + 1e-6), 1 / (1 + 1e-6), 5 / (1 + 1e-6)])
    close(adv.dr_grpo(outcomes, groups), [0, -1, 1, 5])
    close(adv.rloo(outcomes, groups), [0, -1.5, 1.5, 5])
    close(adv.opo(outcomes, torch.tensor([1, 1, 2, 3]), groups), [-0.25, -1.25, 0.75, 5])  # (1 + 0 + 4) / 4
    close(adv.gpg(outcomes, groups), [0, -1, 1, 5])


def test_equal_outcomes_give_exactly_zero() -> None:
    outcomes, groups = torch.full((6,), 0.1, dtype=torch.float32), torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    for result in (adv.grpo(outcomes, groups), adv.rloo(outcomes, groups), adv.opo(outcomes, lengths, groups)):
        assert (result == 0).all()
    assert (adv.gpg(outcomes, groups) == 0).all() and not shaping.informative(outcomes, groups).any()


def test_gpg_makes_up_for_groups_without_gradient() -> None:
    outcomes, groups = tensor(1, 0, 1, 1), torch.tensor([0, 0, 1, 1])
    close(adv.gpg(outcomes, groups), [1, -1, 0, 0])  # alpha = 4 / 2, deviations 1/2


def test_remax_and_reinforce_plus_plus() -> None:
    rewards = tensor(NAN, 0.5, 0, 1, NAN)
    advantages, returns = adv.remax(rewards, tensor(0.25, 3), MASK, CU)
    close(returns, [0, 1.5, 1, 1, 0])
    close(advantages, [0, 1.25, 0.75, 0.75, 0])
    advantages, returns = adv.reinforce_plus_plus(rewards, MASK, CU, 0.5)
    close(returns, [0, 0.75, 0.5, 1, 0])
    std = math.sqrt((0 + 0.0625 + 0.0625) / 2 + 1e-8)
    close(advantages, [0, 0, -0.25 / std, 0.25 / std, 0])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss_weights_are_their_definition(mode: str) -> None:
    # responses of 2, 0 and 3 tokens, with prompts and a hole
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1]).bool()
    cu = torch.tensor([0, 3, 5, 9])
    weights = losses.loss_weights(mode, mask, cu, max_response_tokens=8, dtype=F64)
    first, third = {
        "token-mean": (1 / 5, 1 / 5),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-mean": (1 / 4, 1 / 6),
        "seq-mean-token-sum-norm": (1 / 16, 1 / 16),
    }[mode]
    close(weights, [0, first, first, 0, 0, third, 0, third, third])


def one_token(ratio: float, advantage: float) -> PolicyInputs:
    log_probs = torch.tensor([0.0, math.log(ratio) - 1.0], dtype=F64, requires_grad=True)
    mask = torch.tensor([False, True])
    return PolicyInputs(log_probs, tensor(0, -1), tensor(0, advantage), mask, torch.tensor([0, 2]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: -A r, and the gradient in log-prob is the same
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (0.5, 2.0, -1.0, -1.0),  # too low, but raising it is wanted
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    inputs = one_token(ratio, advantage)
    token_loss, metrics = losses.ppo_clip(inputs, 0.2, 0.28, clip_dual=3.0)
    token_loss.sum().backward()
    close(token_loss.detach(), [0, loss])
    close(inputs.log_probs.grad, [0, gradient])
    assert bool(metrics["clip_frac"][1]) == (gradient == 0 and ratio != 5.0)
    assert bool(metrics["dual_clip_frac"][1]) == (ratio == 5.0 and advantage < 0)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    inputs = one_token(5.0, 2.0)
    token_loss, metrics = losses.cispo(inputs, 1.0, 0.28)
    token_loss.sum().backward()
    close(inputs.log_probs.grad, [0, -1.28 * 2.0])
    assert metrics["clip_frac"][1]


def test_sapo_gate() -> None:
    inputs = one_token(1.0, 2.0)
    token_loss, _ = losses.sapo(inputs, 1.0, 1.05)
    token_loss.sum().backward()
    close(token_loss.detach(), [0, -2.0 * 0.5 * 4.0])
    close(inputs.log_probs.grad, [0, -2.0])  # at ratio 1 the gradient is the policy gradient's


def test_gspo_sequence_ratio() -> None:
    mask, cu = torch.tensor([False, True, True]), torch.tensor([0, 3])
    log_probs = torch.tensor([0.0, -0.8, -1.0], dtype=F64, requires_grad=True)
    inputs = PolicyInputs(log_probs, tensor(0, -1, -1.6), tensor(0, 1, 1), mask, cu)  # log-ratios 0.2, 0.6: mean 0.4
    token_loss, _ = losses.gspo(inputs, 0.1, 0.6)
    (losses.loss_weights("seq-mean-token-mean", mask, cu, dtype=F64) * token_loss).sum().backward()
    close(token_loss.detach(), [0, -math.exp(0.4), -math.exp(0.4)])
    close(log_probs.grad, [0, -math.exp(0.4) / 2, -math.exp(0.4) / 2])


def test_value_loss() -> None:
    values = torch.tensor([0.0, 1.0, 0.1], dtype=F64, requires_grad=True)
    mask = torch.tensor([False, True, True])
    # 1.0 is clipped to 0.2 around the old 0, further from 2; 0.1 is inside
    loss, metrics = losses.value_mse(values, tensor(0, 0, 0), tensor(0, 2, 1), mask, 0.2)
    loss.sum().backward()
    close(loss.detach(), [0, 0.5 * 1.8**2, 0.5 * 0.9**2])
    close(values.grad, [0, 0, -0.9])
    assert metrics["value_clip_frac"].tolist() == [False, True, False]
    close(losses.value_mse(values.detach(), tensor(0, 0, 0), tensor(0, 2, 1), mask, None)[0], [0, 0.5, 0.405])


def test_kl_estimators() -> None:
    args = tensor(NAN, -1), tensor(NAN, -1.5), torch.tensor([False, True])
    close(kl_estimate(*args, "k1"), [0, 0.5])
    close(kl_estimate(*args, "k2"), [0, 0.125])
    close(kl_estimate(*args, "k3"), [0, math.exp(-0.5) - 1 + 0.5])
    assert kl_estimate(tensor(-30, -30), tensor(0, -1), torch.tensor([True, True]), "k3").tolist() == [10.0, 10.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_straight_through_gradient(estimator: str) -> None:
    log_probs = tensor(-1.0).requires_grad_(True)
    kl = kl_estimate(log_probs, tensor(-1.5), torch.tensor([True]), estimator, straight_through=True)
    kl.sum().backward()
    close(log_probs.grad, [0.5])
    close(kl.detach(), kl_estimate(log_probs.detach(), tensor(-1.5), torch.tensor([True]), estimator))


def test_straight_through_estimates_the_gradient_of_the_kl() -> None:
    """Enumerated over the vocabulary, E[k2's gradient] is the exact gradient of KL(p || q); k1's is 0."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=F64, requires_grad=True)
    reference = tensor(0.1, 0.4, -0.5).log_softmax(0)
    exact = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)[0]
    for straight_through, expected in ((True, exact), (False, torch.zeros_like(exact))):
        kl = kl_estimate(logits.log_softmax(0), reference, torch.ones(3).bool(), "k1", straight_through)
        close(torch.autograd.grad((logits.softmax(0).detach() * kl).sum(), logits)[0], expected)


def test_kl_controller() -> None:
    fixed = KLController(AlgorithmConfig(kl_coef=0.5))
    fixed.update(9.0, 100)
    assert fixed.coef == 0.5
    adaptive = KLController(AlgorithmConfig(kl_coef=0.5, kl_target=0.1, kl_horizon=1000))
    adaptive.update(9.0, 100)  # far above: +20 % of 100 / 1000
    assert adaptive.coef == pytest.approx(0.51)
    adaptive.update(0.09, 100)  # 10 % below
    assert adaptive.coef == pytest.approx(0.51 * 0.99)
    resumed = KLController(AlgorithmConfig(kl_coef=0.5, kl_target=0.1, kl_horizon=1000))
    resumed.load_state(adaptive.state())
    assert resumed.coef == adaptive.coef
    with pytest.raises(AssertionError, match="nan"):
        adaptive.update(NAN, 1)


CORRECTION_CU, CORRECTION_MASK = torch.tensor([0, 3, 5]), torch.tensor([False, True, True, False, True])
LOG_RATIO = tensor(0, math.log(3), math.log(0.5), 0, math.log(1.2))  # sequences: 1.5 (geometric 1.22), 1.2


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("tis-token", [0, 2, 0.5, 0, 1.2]),
        ("tis-sequence", [0, 1.5, 1.5, 0, 1.2]),
        ("icepop-token", [0, 0, 0, 0, 1.2]),
        ("icepop-sequence", [0, 1.5, 1.5, 0, 1.2]),
    ],
)
def test_importance_weights(method: str, expected: list[float]) -> None:
    args = LOG_RATIO, CORRECTION_MASK, CORRECTION_CU, method, 0.6, 2.0
    close(importance_weights(*args), expected)
    per_sequence = method.endswith("sequence")
    mean = (expected[1] + expected[4]) / 2 if per_sequence else (expected[1] + expected[2] + expected[4]) / 3
    close(importance_weights(*args, normalize=True), [x / mean for x in expected])


@pytest.mark.parametrize(
    ("rule", "low", "high", "expected"),
    [
        ("token-k1", 0.4, 2.0, [0, 0, 1, 0, 1]),
        ("token-k1", 0.6, 4.0, [0, 1, 0, 0, 1]),
        ("seq-sum-k1", 0.5, 1.4, [0, 0, 0, 0, 1]),
        ("seq-mean-k1", 0.5, 1.21, [0, 0, 0, 0, 1]),  # sqrt(1.5) = 1.22
        ("seq-max-k2", 0.0, 0.3, [0, 0, 0, 0, 1]),  # log(3)^2 / 2 = 0.6
        ("token-k3", 0.0, 0.2, [0, 0, 1, 0, 1]),  # 0.5 - 1 + log 2 = 0.193; 3 - 1 - log 3 = 0.9
        ("seq-mean-k3", 0.0, 0.5, [0, 0, 0, 0, 1]),
    ],
)
def test_acceptance(rule: str, low: float, high: float, expected: list[int]) -> None:
    accepted = acceptance_mask(LOG_RATIO, CORRECTION_MASK, CORRECTION_CU, rule, low, high)
    assert accepted.tolist() == [bool(x) for x in expected]


def test_mismatch_metrics() -> None:
    metrics = mismatch_metrics(LOG_RATIO, CORRECTION_MASK, CORRECTION_CU)
    assert metrics["mismatch/kl"] == pytest.approx(-math.log(1.8) / 3)
    assert metrics["mismatch/k3"] == pytest.approx((4.7 - 3 - math.log(1.8)) / 3)
    assert metrics["mismatch/abs_max"] == pytest.approx(math.log(3))
    assert metrics["mismatch/ess"] == pytest.approx(4.7**2 / (3 * (9 + 0.25 + 1.44)))
    low, high = math.log(1.2), math.log(6) / 2
    assert metrics["mismatch/seq_p50"] == pytest.approx((low + high) / 2)
    assert metrics["mismatch/seq_p95"] == pytest.approx(low + 0.95 * (high - low))
    with_empty = torch.cat([CORRECTION_CU, torch.tensor([5, 5])])  # two sequences without a response change nothing
    assert mismatch_metrics(LOG_RATIO, CORRECTION_MASK, with_empty) == metrics
