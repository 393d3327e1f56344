"""Aggregation, policy and value losses, with gradients, against recorded results of verl and TRL."""

import pytest
import torch
from torch import Tensor

from hpc_rl.algo import losses
from hpc_rl.algo.correction import acceptance_mask, importance_weights
from hpc_rl.algo.losses import PolicyInputs, TokenLoss
from hpc_rl.algo.masked import keep, masked_mean, segment_count, segment_mean
from hpc_rl.algo.step import policy_loss
from hpc_rl.batch import Batch, cumulative
from hpc_rl.config import AlgorithmConfig, Config
from tests.algo.cases import LAYOUTS, Case, Flat, close, load

NO_POLICY_LOSS = ("geo_mean", "dppo_tv", "dppo_kl", "dro", "kl_cov")
ALL_POLICY = [c for c in load("policy_loss") if c.params.get("loss_mode") not in NO_POLICY_LOSS]
POLICY = [c for c in ALL_POLICY if c.params.get("loss_mode") != "bypass_mode"]
BYPASS = [c for c in ALL_POLICY if c.params.get("loss_mode") == "bypass_mode"]
# One ratio per sequence exists for the clipped loss alone (gspo); luspo is not offered.
TRL = [
    c
    for c in load("trl_grpo_loss")
    if c.params["loss_type"] != "luspo"
    and (c.params["importance_sampling_level"] == "token" or c.params["loss_type"] not in ("cispo", "sapo"))
]

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def cases(of: list[Case] | tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", of, ids=lambda c: c.name)


def weights_of(case: Case, flat: Flat, mode: str | None = None) -> Tensor:
    """`loss_weights` as the case aggregates: alone, or as one part of a mini-batch with recorded global counts."""
    mode = mode or case.params["loss_agg_mode"]
    limit = case.params.get("loss_scale_factor") or flat.shape[1]
    if mode == "token-sum":  # not offered: the token mean without its denominator
        return flat.mask.double() * case.params.get("dp_size", 1)
    if "global_batch_size" not in case.params:
        return losses.loss_weights(mode, flat.mask, flat.cu_seqlens, limit, torch.float64)
    others = _other_lengths(case, flat)
    mask = torch.cat([flat.mask, torch.ones(int(others.sum()), dtype=torch.bool)])
    cu_seqlens = cumulative(torch.cat([flat.cu_seqlens.diff(), others]))
    weights = losses.loss_weights(mode, mask, cu_seqlens, limit, torch.float64)
    return weights[: flat.mask.numel()] * case.params["dp_size"]  # verl averages gradients over dp later


def _other_lengths(case: Case, flat: Flat) -> Tensor:
    """Lengths of sequences on other ranks that bring the mini-batch to the recorded global counts.

    A recorded count of sequences is a denominator as it stands; here it is that of sequences with tokens.
    """
    here = segment_count(flat.mask, flat.cu_seqlens)
    count = case.params["global_batch_size"] - int((here > 0).sum())
    tokens = case.params["batch_num_tokens"] - int(here.sum())
    lengths = torch.ones(count, dtype=torch.int64)
    if tokens >= count:
        lengths[0] += tokens - count
    else:  # the recorded numbers contradict each other: only the count that the mode uses can be met
        assert case.params["loss_agg_mode"] != "token-mean"
    return lengths


@layouts
@cases(load("agg_loss"))
def test_aggregation(case: Case, layout: str) -> None:
    flat = Flat(case["loss_mask"], layout)
    loss = (weights_of(case, flat) * keep(flat(case["loss_mat"]), flat.mask)).sum()
    if not flat.mask.any():  # verl gives nan: here there is nothing to learn
        assert loss == 0
    else:
        close(loss, case.expected["loss"])


def token_loss(case: Case, inputs: PolicyInputs) -> TokenLoss:
    params, mode = case.params, case.params.get("loss_mode", "reinforce")
    low = params.get("clip_ratio_low", 0.2)
    high = params.get("clip_ratio_high", 0.2)
    return {
        "vanilla": lambda: losses.ppo_clip(inputs, low, high, params.get("clip_ratio_c", 3.0)),
        "gspo": lambda: losses.gspo(inputs, low, high),
        "cispo": lambda: losses.cispo(inputs, low, high),
        "sapo": lambda: losses.sapo(inputs, params["tau_pos"], params["tau_neg"]),
        "gpg": lambda: losses.reinforce(inputs),
        "reinforce": lambda: losses.reinforce(inputs),
    }[mode]()


@layouts
@cases(POLICY)
def test_policy_loss(case: Case, layout: str) -> None:
    flat, mode = Flat(case["response_mask"], layout), case.params.get("loss_mode", "reinforce")
    log_probs = flat(case["log_prob"]).requires_grad_(True)
    old = flat(case["old_log_prob" if "old_log_prob" in case.inputs else "rollout_log_prob"])
    inputs = PolicyInputs(log_probs, old, flat(case["advantages"]), flat.mask, flat.cu_seqlens)
    loss, metrics = token_loss(case, inputs)
    if "rollout_is_weights" in case.inputs:
        loss = loss * keep(flat(case["rollout_is_weights"]), flat.mask)
    # verl's sapo always aggregates by seq-mean-token-mean; here that is its default and any mode may be set.
    total = (weights_of(case, flat, "seq-mean-token-mean" if mode == "sapo" else None) * loss).sum()
    total.backward()
    if not flat.mask.any():  # verl: nan
        assert total == 0 and (log_probs.grad == 0).all()
        return
    close(total, case.expected["loss"])
    flat.check(log_probs.grad, case.expected["grad_log_prob"])
    check_metrics(case, flat, inputs, metrics)


def check_metrics(case: Case, flat: Flat, inputs: PolicyInputs, metrics: dict[str, Tensor]) -> None:
    log_ratio = inputs.log_ratio().detach()
    expected = case.expected.get("metrics.actor/ppo_kl")
    if expected is not None and log_ratio.abs().max() <= losses.LOG_RATIO_MAX:  # not all of verl's losses clamp it
        close(masked_mean(-log_ratio, flat.mask), expected)
    mode = case.params.get("loss_mode")
    if mode in ("vanilla", "gspo"):
        close(masked_mean(metrics["clip_frac"].double(), flat.mask), case.expected["metrics.actor/pg_clipfrac"])
    if mode == "vanilla":
        lower = masked_mean(metrics["dual_clip_frac"].double(), flat.mask)
        close(lower, case.expected["metrics.actor/pg_clipfrac_lower"])


@layouts
@cases(BYPASS)
def test_bypass(case: Case, layout: str) -> None:
    """old = rollout: the weights are the policy's own ratio, and what is rejected leaves the mask."""
    flat, rules = Flat(case["response_mask"], layout), case.params["rollout_correction"]
    log_probs, old = flat(case["log_prob"]).requires_grad_(True), flat(case["old_log_prob"])
    log_ratio = keep(log_probs.detach() - old, flat.mask)
    rule = rules["rollout_rs"].replace("_", "-")
    mask = acceptance_mask(log_ratio, flat.mask, flat.cu_seqlens, rule, 0.0, float(rules["rollout_rs_threshold"]))
    inputs = PolicyInputs(log_probs, old, flat(case["advantages"]), mask, flat.cu_seqlens)
    if rules["loss_type"] == "ppo_clip":
        loss, _ = losses.ppo_clip(inputs, 0.2, 0.2, 3.0)
    else:
        method = f"tis-{rules['rollout_is']}"
        weights = importance_weights(
            log_ratio, flat.mask, flat.cu_seqlens, method, high=float(rules["rollout_is_threshold"])
        )
        loss = losses.reinforce(inputs)[0] * weights
    weights = losses.loss_weights(case.params["loss_agg_mode"], mask, flat.cu_seqlens, flat.shape[1], torch.float64)
    total = (weights * loss).sum()
    total.backward()
    close(total, case.expected["loss"])
    flat.check(log_probs.grad, case.expected["grad_log_prob"])


@layouts
@cases(load("value_loss"))
def test_value_loss(case: Case, layout: str) -> None:
    flat = Flat(case["response_mask"], layout)
    values = flat(case["vpreds"]).requires_grad_(True)
    loss, metrics = losses.value_mse(
        values, flat(case["values"]), flat(case["returns"]), flat.mask, case.params["cliprange_value"]
    )
    total = (weights_of(case, flat) * loss).sum()
    total.backward()
    close(total, case.expected["vf_loss"])
    close(masked_mean(metrics["value_clip_frac"].double(), flat.mask), case.expected["vf_clipfrac"])
    flat.check(values.grad, case.expected["grad_vpreds"])


@layouts
@cases(TRL)
def test_trl_grpo(case: Case, layout: str) -> None:
    """The whole loss function of a step: policy loss and KL together."""
    flat, params = Flat(case["response_mask"], layout), case.params
    algo, mode = _trl_config(case)
    config = Config(algorithm=AlgorithmConfig(**algo))
    log_probs = flat(case["log_prob"]).requires_grad_(True)
    mean = losses.loss_weights("token-mean", flat.mask, flat.cu_seqlens, dtype=torch.float64)
    limit = params.get("max_completion_length", flat.shape[1])
    tokens = {
        "response_mask": flat.mask,
        "old_log_probs": flat(case["old_log_prob"]),
        "advantages": flat(case["advantages"][:, None].expand(flat.shape)),
        "loss_weights": losses.loss_weights(mode, flat.mask, flat.cu_seqlens, limit, torch.float64),
        "value_loss_weights": mean,
    }
    if params["beta"]:
        tokens["ref_log_probs"] = flat(case["ref_log_prob"])
    loss, metrics = policy_loss(config, params["beta"])({"log_probs": log_probs}, Batch(flat.cu_seqlens, tokens))
    loss.backward()
    # TRL's means over sequences count those without a response, this project's do not.
    counts = segment_count(flat.mask, flat.cu_seqlens)
    share = (counts > 0).sum() / counts.numel() if mode != "token-mean" else 1.0
    close(loss * share, case.expected["loss"])
    flat.check(log_probs.grad * share, case.expected["grad_log_prob"])
    if params["importance_sampling_level"] == "token" and "metrics.clip_ratio/region_mean" in case.expected:
        close(metrics["clip_frac"], case.expected["metrics.clip_ratio/region_mean"])
    if "metrics.kl" in case.expected:
        close(metrics["kl_loss"], case.expected["metrics.kl"])


def _trl_config(case: Case) -> tuple[dict[str, object], str]:
    params, kind = case.params, case.params["loss_type"]
    mode = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    algo = {
        "name": {"cispo": "cispo", "sapo": "sapo"}.get(kind, "grpo"),
        "clip_low": params["epsilon_low"],
        "clip_high": params["epsilon_high"],
        "clip_dual": params.get("delta"),
        "kl_placement": "loss" if params["beta"] else "none",
        "kl_estimator": "k3",
    }
    if params["importance_sampling_level"] == "sequence":
        algo["name"] = "gspo"
    if kind == "cispo":  # its epsilon_high is the bound itself, and there is no lower one
        algo |= {"clip_low": 1.0, "clip_high": params["epsilon_high"] - 1.0}
    return algo, mode.get(kind, "token-mean")


def test_gspo_ratio_is_the_geometric_mean() -> None:
    case = next(c for c in POLICY if c.name == "gspo_wide_token-mean_right")
    flat = Flat(case["response_mask"], "trimmed")
    inputs = PolicyInputs(
        flat(case["log_prob"]), flat(case["old_log_prob"]), flat(case["advantages"]), flat.mask, flat.cu_seqlens
    )
    _, metrics = losses.gspo(inputs, 0.2, 0.2)
    geometric = segment_mean(inputs.log_ratio(), flat.mask, flat.cu_seqlens).exp()
    close(segment_mean(metrics["ratio"], flat.mask, flat.cu_seqlens), geometric)
