"""DPO, IPO and reward-model losses against recorded results of TRL; and the count of all golden cases."""

import pytest
import torch

from hpc_rl.algo import preference
from tests.algo.cases import Case, close, load
from tests.algo.test_golden_correction import CASES as CORRECTION
from tests.algo.test_golden_head import ENTROPY, LOG_PROBS
from tests.algo.test_golden_losses import BYPASS, POLICY, TRL
from tests.algo.test_golden_rewards import ADVANTAGE, GAE, KL, KL_IN_REWARD, WHITEN

parametrize = pytest.mark.parametrize
DPO = [
    c
    for c in load("dpo")
    if c.params["loss_type"] in ("sigmoid", "ipo") and not {"ld_alpha", "f_divergence_type"} & set(c.params)
]


@parametrize("case", DPO, ids=lambda c: c.name)
def test_dpo(case: Case) -> None:
    """TRL's rows are all chosen, then all rejected, and its log-probs lack the first token."""
    mask = case["completion_mask"].bool()
    rows, width = mask.shape
    order = torch.arange(rows).reshape(2, -1).T.flatten()  # chosen and rejected side by side
    cu_seqlens = torch.arange(rows + 1) * width
    poison = torch.full((rows, 1), float("nan"), dtype=torch.float64)
    mask[:, 0] = False
    log_probs = torch.cat([poison, case["per_token_logps"]], 1)[order].flatten().requires_grad_(True)
    ref_log_probs = torch.cat([poison, case["ref_per_token_logps"]], 1)[order].flatten()
    beta, ipo = case.params["beta"], case.params["loss_type"] == "ipo"
    sums = preference.log_ratio_margins(log_probs, ref_log_probs, mask[order].flatten(), cu_seqlens)
    if ipo:
        means = preference.log_ratio_margins(log_probs, ref_log_probs, mask[order].flatten(), cu_seqlens, average=True)
        loss = preference.ipo(*means, beta).mean()
    else:
        loss = preference.dpo(*sums, beta, case.params.get("label_smoothing", 0.0)).mean()
    loss.backward()
    close(loss, case.expected["loss"])
    grad = log_probs.grad.reshape(rows, width)[order.argsort()]
    close(grad[mask], case.expected["grad_per_token_logps"][mask[:, 1:]])  # TRL sums what is not masked too
    assert (grad[~mask] == 0).all()

    metrics = preference.pair_metrics(*sums, scale=beta)
    for ours, theirs in (
        ("reward_chosen", "chosen"), ("reward_rejected", "rejected"), ("accuracy", "accuracies"), ("margin", "margins"),
    ):  # fmt: skip
        close(metrics[ours].double().mean(), case.expected[f"metrics.rewards/{theirs}"])
    chosen = preference.sequence_log_probs(log_probs, mask[order].flatten(), cu_seqlens)[0::2]
    close(chosen.mean(), case.expected["metrics.logps/chosen"])


@parametrize("case", load("reward_model"), ids=lambda c: c.name)
def test_reward_model(case: Case) -> None:
    chosen, rejected = (case[f"rewards_{side}"].clone().requires_grad_(True) for side in ("chosen", "rejected"))
    center = case.params["center_rewards_coefficient"] or 0.0
    loss = preference.reward_model(chosen, rejected, case.inputs.get("margin"), center).mean()
    loss.backward()
    close(loss, case.expected["loss"])
    close(chosen.grad, case.expected["grad_chosen"])
    close(rejected.grad, case.expected["grad_rejected"])
    metrics = preference.pair_metrics(chosen, rejected)
    close(metrics["accuracy"].double().mean(), case.expected["metrics.accuracy"])
    close(metrics["margin"].mean(), case.expected["metrics.margin"])


def test_every_case_is_asserted_or_named() -> None:
    """1,129 recorded cases: those without a counterpart are listed in golden/README.md."""
    names = "whiten gae advantage kl kl_controller kl_in_reward agg_loss policy_loss value_loss entropy trl_grpo_loss"
    recorded = {name: len(load(name)) for name in f"{names} rollout_corr dpo reward_model".split()}
    assert sum(recorded.values()) == 1129
    asserted = {
        "whiten": len(WHITEN), "gae": len(GAE), "advantage": len(ADVANTAGE), "kl": len(KL), "kl_controller": 3,
        "kl_in_reward": len(KL_IN_REWARD), "agg_loss": 90, "policy_loss": len(POLICY) + len(BYPASS), "value_loss": 45,
        "entropy": len(ENTROPY) + len(LOG_PROBS), "trl_grpo_loss": len(TRL), "rollout_corr": len(CORRECTION), "dpo": len(DPO),
        "reward_model": 18,
    }  # fmt: skip
    without = {name: recorded[name] - asserted[name] for name in recorded if recorded[name] != asserted[name]}
    assert without == {
        "advantage": 37, "kl": 7, "kl_in_reward": 12, "policy_loss": 50, "trl_grpo_loss": 8,
        "rollout_corr": 1, "dpo": 30,
    }  # fmt: skip
