"""Whitening, advantages, KL estimators and penalties against recorded results of verl."""

import pytest
import torch

from hpc_rl.algo import advantages as adv
from hpc_rl.algo import masked
from hpc_rl.algo.kl import KLController, kl_estimate
from hpc_rl.algo.step import prepare
from hpc_rl.batch import Batch
from hpc_rl.config import AlgorithmConfig, Config
from tests.algo.cases import LAYOUTS, Case, Flat, close, integers, load

ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
NO_ADVANTAGE = ("grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline")

WHITEN = load("whiten")
GAE = load("gae")
ADVANTAGE = [c for c in load("advantage") if c.params["estimator"] not in NO_ADVANTAGE and not c.informational]
KL = [c for c in load("kl") if c.params["kl_penalty"].rstrip("+") in ESTIMATORS]
KL_IN_REWARD = [c for c in load("kl_in_reward") if c.params["kl_penalty"] in ESTIMATORS]

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def cases(of: list[Case] | tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", of, ids=lambda c: c.name)


@layouts
@cases(WHITEN)
def test_whiten(case: Case, layout: str) -> None:
    flat = Flat(case["mask"], layout)
    values, mask = flat(case["values"]), flat.mask
    if case.raises:  # a single token: verl raises, here it has no spread
        assert (masked.whiten(values, mask) == 0).all() and masked.masked_var(values, mask) == 0
    elif case.name == "whiten_constant":  # verl's mean, sum / (count + 1e-8), leaves 2e-5; here equal values give 0
        assert (masked.whiten(values, mask) == 0).all()
        flat.check(masked.whiten(values, mask) + 2.0833e-5 * mask, case.expected["whitened"])
    elif case.fn == "masked_mean_rows":
        close(masked.segment_mean(values, mask, flat.cu_seqlens), case.expected["mean"])
        close(masked.segment_sum(masked.keep(values, mask), flat.cu_seqlens), case.expected["sum"])
    else:
        flat.check(masked.whiten(values, mask, case.params["shift_mean"]), case.expected["whitened"])
        close(masked.masked_mean(values, mask), case.expected["mean"])
        close(masked.masked_var(values, mask), case.expected["var_unbiased"])
        close(masked.masked_var(values, mask, unbiased=False), case.expected["var_biased"])


@layouts
@cases(GAE)
def test_gae(case: Case, layout: str) -> None:
    flat = Flat(case["response_mask"], layout)
    advantages, returns = adv.gae(
        flat(case["token_level_rewards"]), flat(case["values"]), flat.mask, flat.cu_seqlens,
        case.params["gamma"], case.params["lam"],
    )  # fmt: skip
    flat.check(masked.whiten(advantages, flat.mask), case.expected["advantages"])
    flat.check(returns, case.expected["returns"])


@layouts
@cases(ADVANTAGE)
def test_advantage(case: Case, layout: str) -> None:
    flat, name = Flat(case["response_mask"], layout), case.params["estimator"]
    rewards, mask, cu_seqlens = masked.keep(flat(case["token_level_rewards"]), flat.mask), flat.mask, flat.cu_seqlens
    if name == "reinforce_plus_plus":
        advantages, returns = adv.reinforce_plus_plus(rewards, mask, cu_seqlens, case.params["gamma"])
    elif name == "remax":
        advantages, returns = adv.remax(rewards, case["reward_baselines"], mask, cu_seqlens)
    else:
        advantages = returns = _outcome_advantage(case, flat)
    flat.check(advantages, case.expected["advantages"])
    flat.check(returns, case.expected["returns"])


def _outcome_advantage(case: Case, flat: Flat) -> torch.Tensor:
    """verl sums rewards over the whole row, masked tokens too; `prepare` hands over those of the response only."""
    name, scores, groups = case.params["estimator"], case["token_level_rewards"].sum(-1), integers(case["index"])
    lengths = masked.segment_count(flat.mask, flat.cu_seqlens)
    if name == "reinforce_plus_plus_baseline":
        return adv.reinforce_plus_plus_baseline(scores, groups, flat.mask, flat.cu_seqlens)
    per_sequence = {
        "grpo": lambda: adv.grpo(scores, groups),
        "grpo_nostd": lambda: adv.dr_grpo(scores, groups),
        "rloo": lambda: adv.rloo(scores, groups),
        "opo": lambda: adv.opo(scores, lengths, groups),
        "gpg": lambda: adv.gpg(scores, groups) * _gpg_scale(scores, groups),
    }[name.removesuffix("_vectorized") + ("" if case.params.get("norm_adv_by_std_in_grpo", True) else "_nostd")]()
    if name == "rloo_vectorized":  # gives 0 to a group of one, where all others, and this project, keep the raw score
        per_sequence = per_sequence.masked_fill(adv.group_statistics(scores, groups).size == 1, 0.0)
    return adv.to_tokens(per_sequence, flat.mask, flat.cu_seqlens)


def _gpg_scale(scores: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """verl's alpha over the paper's: B / (scores other than 0) against B / (samples of groups with two outcomes)."""
    uniform = adv.group_statistics(scores, groups).uniform
    return (~uniform).sum().clamp(min=1) / (scores != 0).sum().clamp(min=1)


@layouts
@cases(KL)
def test_kl_estimate(case: Case, layout: str) -> None:
    name = case.params["kl_penalty"]
    shape = case["logprob"].shape
    flat = Flat(torch.ones(shape), layout)
    log_probs = flat(case["logprob"]).requires_grad_(True)
    kl = kl_estimate(
        log_probs, flat(case["ref_logprob"]), flat.mask, ESTIMATORS[name.rstrip("+")], straight_through=name[-1] == "+"
    )
    kl.sum().backward()
    flat.check(kl.detach(), case.expected["kl"])
    flat.check(log_probs.grad, case.expected["grad_logprob"])


@cases(load("kl_controller"))
def test_kl_controller(case: Case) -> None:
    params = case.params
    target = params["target_kl"] if params["type"] == "adaptive" else None
    controller = KLController(
        AlgorithmConfig(kl_coef=params["init_kl_coef"], kl_target=target, kl_horizon=params["horizon"])
    )
    coefs = [controller.coef]
    for kl, num_sequences in zip(case["current_kl"].tolist(), case["n_steps"].tolist(), strict=True):
        controller.update(kl, int(num_sequences))
        coefs.append(controller.coef)
    close(coefs, case.expected["kl_coef"])


@layouts
@cases(KL_IN_REWARD)
def test_kl_in_reward(case: Case, layout: str) -> None:
    flat, params = Flat(case["response_mask"], layout), case.params
    batch = _batch(case, flat)
    config = Config(
        algorithm=AlgorithmConfig(
            name={"gae": "ppo"}.get(params["estimator"], params["estimator"]),
            gamma=params["gamma"], lam=params["lam"], kl_placement="reward", kl_coef=params["init_kl_coef"],
            kl_estimator=ESTIMATORS[params["kl_penalty"]], kl_horizon=params["horizon"],
            kl_target=params["target_kl"] if params["type"] == "adaptive" else None,
        )
    )  # fmt: skip
    prepared, metrics = prepare(batch, config, params["init_kl_coef"])
    for name in ("token_level_rewards", "advantages", "returns"):
        flat.check(prepared[name], case.expected[name])

    # verl averages over sequences, empty ones as 0; the metric here is over tokens.
    kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], flat.mask, config.algorithm.kl_estimator)
    close(metrics["kl"], kl.sum() / flat.mask.sum())
    by_sequence = masked.segment_mean(kl, flat.mask, flat.cu_seqlens).mean()
    close(by_sequence, case.expected["metrics.actor/reward_kl_penalty"])
    controller = KLController(config.algorithm)
    close(controller.coef, case.expected["metrics.actor/reward_kl_penalty_coeff"])
    controller.update(float(by_sequence), len(batch))
    close(controller.coef, case.expected["kl_coef_after"])


def _batch(case: Case, flat: Flat) -> Batch:
    groups = integers(case["index"]) if "index" in case.inputs else torch.arange(flat.shape[0])
    tokens = {
        "response_mask": flat.mask,
        "token_level_scores": flat(case["token_level_scores"]),
        "old_log_probs": flat(case["old_log_probs"]),
        "rollout_log_probs": flat(case["old_log_probs"]),
        "ref_log_probs": flat(case["ref_log_prob"]),
    }
    if "values" in case.inputs:
        tokens["values"] = flat(case["values"])
    scores = case["token_level_scores"].sum(-1)
    return Batch(flat.cu_seqlens, tokens, {"group_ids": groups, "scores": scores})
