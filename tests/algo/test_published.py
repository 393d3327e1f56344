"""What each name stands for, written out once more: estimator, loss and published values, and a case by hand of each.

paper and section of the values (a value that no paper states is this project's, and the same for all: token mean, clip
0.2 on both sides, lam 0.95, value clip 0.2, k1 in the reward with 0.001):
ppo: 1707.06347, 6.1 (clip 0.2), 1506.02438 (GAE), 1909.08593, 2.2 (KL in the reward). grpo: 2402.03300, eq. 3 and 4 (1 / G
sum 1 / |o| sum, KL as loss, k3). dr_grpo: 2503.20783, 3.2 (no std, a constant for |o|, no KL). rloo: 2402.14740, 3.3 and
eq. 1 (KL in the reward, whole sequences). reinforce_plus_plus, with baseline: 2501.03262, 3 (KL in the reward; k2 as loss).
remax: 2310.10505, alg. 1 (greedy baseline, KL in the reward). opo: 2505.23585, 3 (no KL). gpg: 2504.02546, eq. 8 (no clip,
no KL). dapo: 2503.14476, 3 and 4.1 (0.2 and 0.28, token mean, no KL, buffer 4096 of 20480). gspo: 2507.18071, 4 and 5.1
(3e-4 and 4e-4, 1 / G of sequences). cispo: 2506.13585, 3.1 (no lower bound). sapo: 2511.20347, 3 (tau 1.0 and 1.05,
1 / G sum 1 / |o|). reinforce: Williams 1992.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from hpc_rl.algo.registry import ALGORITHMS, OBJECTIVES, with_defaults
from hpc_rl.algo.step import policy_loss, prepare, value_loss
from hpc_rl.batch import Batch, cumulative
from hpc_rl.config import AlgorithmConfig, Config
from tests.algo.batches import make_config

SUM, MEAN, NORM = "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
# name: advantage, loss, aggregation, clip_low, clip_high, kl_placement, kl_estimator, refill_rounds, overlong of 1000 tokens
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "ppo": ("gae", "ppo_clip", "token-mean", 0.2, 0.2, "reward", "k1", 0, 0),
    "grpo": ("grpo", "ppo_clip", MEAN, 0.2, 0.2, "loss", "k3", 0, 0),
    "dr_grpo": ("dr_grpo", "ppo_clip", NORM, 0.2, 0.2, "none", "k1", 0, 0),
    "rloo": ("rloo", "ppo_clip", SUM, 0.2, 0.2, "reward", "k1", 0, 0),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip", "token-mean", 0.2, 0.2, "reward", "k1", 0, 0),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline", "ppo_clip", "token-mean", 0.2, 0.2, "loss", "k2", 0, 0,
    ),
    "remax": ("remax", "ppo_clip", "token-mean", 0.2, 0.2, "reward", "k1", 0, 0),
    "opo": ("opo", "ppo_clip", "token-mean", 0.2, 0.2, "none", "k1", 0, 0),
    "gpg": ("gpg", "reinforce", "token-mean", 0.2, 0.2, "none", "k1", 0, 0),
    "dapo": ("grpo", "ppo_clip", "token-mean", 0.2, 0.28, "none", "k1", 4, 200),
    "gspo": ("grpo", "gspo", MEAN, 3e-4, 4e-4, "none", "k1", 0, 0),
    "cispo": ("grpo", "cispo", "token-mean", 1.0, 0.28, "none", "k1", 0, 0),
    "sapo": ("grpo", "sapo", MEAN, 0.2, 0.2, "none", "k1", 0, 0),
    "reinforce": ("reinforce", "reinforce", "token-mean", 0.2, 0.2, "reward", "k1", 0, 0),
}  # fmt: skip


def published(name: str, max_response_tokens: Any = 1000, **given: Any) -> AlgorithmConfig:
    values = {"rollout": {"max_response_tokens": max_response_tokens}, "algorithm": {"name": name, **given}}
    return AlgorithmConfig(**with_defaults(values)["algorithm"])


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_values(name: str) -> None:
    a, chosen = published(name), ALGORITHMS[name]
    assert (
        chosen.advantage, chosen.policy_loss, a.aggregation, a.clip_low, a.clip_high, a.kl_placement, a.kl_estimator,
        a.refill_rounds, a.overlong_buffer_tokens,
    ) == PUBLISHED[name]  # fmt: skip
    shared = (a.gamma, a.lam, a.value_clip, a.clip_dual, a.kl_coef, a.entropy_coef, a.whiten_advantages)
    assert shared == (1.0, 0.95, 0.2, None, 0.001, 0.0, True)
    assert (a.sapo_tau_positive, a.sapo_tau_negative, a.overlong_penalty) == (1.0, 1.05, 1.0)
    assert (a.correction, a.reject, a.kl_straight_through, a.epochs, a.mini_batches) == ("none", "none", False, 1, 1)


def test_the_table_holds_all() -> None:
    assert list(PUBLISHED) == list(ALGORITHMS)
    assert {n: (o.loss, o.role, o.needs_reference) for n, o in OBJECTIVES.items()} == {
        "sft": ("sft", "actor", False),
        "dpo": ("dpo", "actor", True),  # 2305.18290: beta 0.1, appendix B
        "ipo": ("ipo", "actor", True),  # 2310.12036
        "reward_model": ("reward_model", "critic", False),
    }
    assert all(published(n).beta == 0.1 and published(n).kl_placement == "none" for n in OBJECTIVES)


def test_overlong_buffer_of_dapo_is_a_share_of_the_limit() -> None:
    assert "fifth of the length limit costs reward" in ALGORITHMS["dapo"].summary
    assert published("dapo", 20480).overlong_buffer_tokens == 4096
    assert published("dapo", 20480, overlong_buffer_tokens=0).overlong_buffer_tokens == 0
    assert published("grpo", 20480).overlong_buffer_tokens == 0
    assert with_defaults({"algorithm": {"name": "dapo"}})["algorithm"]["overlong_buffer_tokens"] == 102  # of 512
    assert (
        "overlong_buffer_tokens"
        not in with_defaults({"rollout": {"max_response_tokens": "long"}, "algorithm": {"name": "dapo"}})["algorithm"]
    ), "a value of the wrong type is for the configuration to refuse"


# ---- advantages -----------------------------------------------------------------------------------------------------

# Responses of three groups; scores differ in two of them. One prompt token before each.
LENGTHS = (2, 1, 3, 2, 1, 1, 1)
SCORES = (1.0, 0.0, 2.0, 3.0, 5.0, 4.0, 4.0)
GROUPS = (0, 0, 0, 1, 1, 2, 2)
BASELINES = (0.5, 0.5, 0.5, 1.0, 1.0, 4.0, 4.0)


def step() -> Batch:
    """Old log-probs 0.25 above the reference's, values 1 everywhere."""
    cu = cumulative(torch.tensor(LENGTHS) + 1)
    n = int(cu[-1])
    mask = torch.ones(n, dtype=torch.bool)
    mask[cu[:-1]] = False
    at_end = torch.zeros(n, dtype=torch.float64)
    at_end[cu[1:] - 1] = torch.tensor(SCORES, dtype=torch.float64)
    old = torch.full((n,), -1.0, dtype=torch.float64)
    tokens = {"response_mask": mask, "token_level_scores": at_end, "old_log_probs": old, "rollout_log_probs": old}
    tokens |= {"ref_log_probs": old - 0.25, "values": torch.ones(n, dtype=torch.float64)}
    sequences = {"scores": torch.tensor(SCORES, dtype=torch.float64), "group_ids": torch.tensor(GROUPS)}
    return Batch(cu, tokens, {**sequences, "baseline_scores": torch.tensor(BASELINES, dtype=torch.float64)})


def on_tokens(*of_sequences: float) -> list[float]:
    return [value for value, length in zip(of_sequences, LENGTHS, strict=True) for _ in range(length)]


def whitened(values: list[float]) -> list[float]:
    mean, std = statistics.fmean(values), math.sqrt(statistics.variance(values) + 1e-8)
    return [(value - mean) / std for value in values]


ONE, TWO = 1 / (1 + 1e-6), 1 / (math.sqrt(2) + 1e-6)
GROUP_NORMALISED = on_tokens(0, -ONE, ONE, -TWO, TWO, 0, 0)
DISCOUNTED = [0.5, 1, 0, 0.5, 1, 2, 1.5, 3, 5, 4, 4]  # gamma 0.5
# delta 0.5 - 1 before the end and score - 1 there; factor 0.5 * 0.8
GAE = [-0.5, 0, -1, -0.54, -0.1, 1, 0.3, 2, 4, 3, 3]
BY_HAND: dict[str, list[float]] = {
    "ppo": whitened(GAE),
    "grpo": GROUP_NORMALISED,
    "dr_grpo": on_tokens(0, -1, 1, -1, 1, 0, 0),
    "rloo": on_tokens(0, -1.5, 1.5, -2, 2, 0, 0),
    "reinforce_plus_plus": whitened(DISCOUNTED),
    "reinforce_plus_plus_baseline": whitened(on_tokens(0, -1, 1, -1, 1, 0, 0)),
    "remax": on_tokens(0.5, -0.5, 1.5, 2, 4, 0, 0),
    "opo": on_tokens(-1 / 3, -4 / 3, 2 / 3, -2 / 3, 4 / 3, 0, 0),  # baselines 8 / 6 and 11 / 3
    "gpg": on_tokens(0, -1.4, 1.4, -1.4, 1.4, 0, 0),  # 7 / 5: two samples teach nothing
    "dapo": GROUP_NORMALISED,
    "gspo": GROUP_NORMALISED,
    "cispo": GROUP_NORMALISED,
    "sapo": GROUP_NORMALISED,
    "reinforce": DISCOUNTED,
}


def close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_advantage_by_hand(name: str) -> None:
    discount = {"gamma": 0.5} if ALGORITHMS[name].uses_gamma else {}
    prepared, _ = prepare(step(), make_config(name, **discount, lam=0.8, kl_placement="none"), 0.0)
    close(prepared["advantages"][prepared["response_mask"]], BY_HAND[name])


def test_advantage_of_ppo_without_whitening_and_its_returns() -> None:
    config = make_config("ppo", gamma=0.5, lam=0.8, kl_placement="none", whiten_advantages=False)
    prepared, _ = prepare(step(), config, 0.0)
    mask = prepared["response_mask"]
    close(prepared["advantages"][mask], GAE)
    close(prepared["returns"][mask], [value + 1 for value in GAE])


@pytest.mark.parametrize(
    ("estimator", "kl"), [("k1", 0.25), ("k2", 0.03125), ("k3", math.exp(-0.25) - 1 + 0.25)], ids=["k1", "k2", "k3"]
)
def test_kl_in_the_reward_by_hand(estimator: str, kl: float) -> None:
    """Returns of REINFORCE: each token still to come costs 0.5 kl."""
    config = make_config("reinforce", kl_placement="reward", kl_estimator=estimator)
    prepared, metrics = prepare(step(), config, 0.5)
    mask = prepared["response_mask"]
    remaining = [length - i for length in LENGTHS for i in range(length)]
    close(prepared["advantages"][mask], [a - 0.5 * kl * r for a, r in zip(on_tokens(*SCORES), remaining, strict=True)])
    assert metrics["kl"] == pytest.approx(kl)


# ---- losses ---------------------------------------------------------------------------------------------------------


def one_token(**tokens: float) -> Batch:
    """A prompt token, and a response token with these values and a weight of 1."""
    values = {name: torch.tensor([0.0, value], dtype=torch.float64) for name, value in tokens.items()}
    ones = torch.tensor([0.0, 1.0], dtype=torch.float64)
    mask = torch.tensor([False, True])
    return Batch(
        torch.tensor([0, 2]), {**values, "response_mask": mask, "loss_weights": ones, "value_loss_weights": ones}
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


NARROW = {"clip_low": 0.1, "clip_high": 0.3}
LOG = math.log(1.5) - 1
POLICY_CASES: list[tuple[str, dict[str, Any], float, float, float]] = [  # ratio, advantage, loss
    *((name, NARROW, 1.5, 1.0, -1.3) for name in PUBLISHED if PUBLISHED[name][1] in ("ppo_clip", "gspo")),
    *((name, NARROW, 0.5, -1.0, 0.9) for name in PUBLISHED if PUBLISHED[name][1] in ("ppo_clip", "gspo")),
    *((n, {"clip_dual": 2.0}, 5.0, -1.0, 2.0) for n in PUBLISHED if PUBLISHED[n][1] == "ppo_clip"),
    ("ppo", {}, 5.0, -1.0, 5.0),
    ("dapo", {}, 1.5, 1.0, -1.28),
    ("gspo", {}, 1.5, 1.0, -1.0004),
    ("gspo", {}, 0.5, -1.0, 0.9997),
    ("cispo", NARROW, 1.5, 1.0, -1.3 * LOG),
    ("cispo", NARROW, 0.5, 1.0, -0.9 * (math.log(0.5) - 1)),
    ("cispo", {}, 0.5, 1.0, -0.5 * (math.log(0.5) - 1)),  # no lower bound
    ("sapo", {"sapo_tau_positive": 2.0}, 1.5, 1.0, -sigmoid(1.0) * 2),
    ("sapo", {"sapo_tau_negative": 3.0}, 1.5, -1.0, sigmoid(1.5) * 4 / 3),
    ("sapo", {}, 1.5, -1.0, sigmoid(1.05 * 0.5) * 4 / 1.05),
    ("gpg", {}, 1.5, 2.0, -2 * LOG),
    ("reinforce", {}, 1.5, 2.0, -2 * LOG),
]


@pytest.mark.parametrize(("name", "values", "ratio", "advantage", "loss"), POLICY_CASES)
def test_policy_loss_by_hand(name: str, values: dict[str, Any], ratio: float, advantage: float, loss: float) -> None:
    config = Config(algorithm=published(name, kl_placement="none", **values))
    batch = one_token(old_log_probs=-1.0, advantages=advantage)
    log_probs = torch.tensor([0.0, math.log(ratio) - 1.0], dtype=torch.float64)
    assert float(policy_loss(config, 0.0)({"log_probs": log_probs}, batch)[0]) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(("clip", "loss"), [(0.5, 0.5 * 1.5**2), (1.0, 0.5), (None, 0.0), (9.0, 0.0)])
def test_value_loss_by_hand(clip: float | None, loss: float) -> None:
    """From 1 to 3, which is the return: clipped to 1 + clip, so far from it."""
    batch = one_token(values=1.0, returns=3.0)
    values = torch.tensor([0.0, 3.0], dtype=torch.float64)
    got, metrics = value_loss(make_config("ppo", value_clip=clip))({"values": values}, batch)
    assert float(got) == pytest.approx(loss) and float(metrics["value_clip_frac"]) == float(loss > 0)


def test_default_of_the_value_clip_reaches_the_loss() -> None:
    batch, values = one_token(values=1.0, returns=3.0), torch.tensor([0.0, 3.0], dtype=torch.float64)
    assert float(value_loss(make_config("ppo"))({"values": values}, batch)[0]) == pytest.approx(0.5 * 1.8**2)
