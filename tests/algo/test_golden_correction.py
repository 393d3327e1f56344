"""Correction of the mismatch between sampler and trainer against recorded results of verl."""

import pytest
import torch

from hpc_rl.algo.correction import acceptance_mask, importance_weights, mismatch, mismatch_metrics
from hpc_rl.algo.masked import masked_mean
from tests.algo.cases import LAYOUTS, Case, Flat, close, load

CASES = [c for c in load("rollout_corr") if c.name != "k2_rejects_range"]  # an option's syntax of verl's

parametrize = pytest.mark.parametrize
layouts = parametrize("layout", LAYOUTS)


@layouts
@parametrize("case", [c for c in CASES if "rollout_is" in c.params and not c.raises], ids=lambda c: c.name)
def test_importance_weights(case: Case, layout: str) -> None:
    flat = Flat(case["response_mask"], layout)
    flat.check(_weights(case, flat), case.expected["rollout_is_weights"])


def _weights(case: Case, flat: Flat) -> torch.Tensor:
    level, bounds = case.params["rollout_is"], str(case.params["rollout_is_threshold"]).split("_")
    low, high = (0.0, float(bounds[0])) if len(bounds) == 1 else map(float, bounds)
    method = f"{'tis' if len(bounds) == 1 else 'icepop'}-{level}"
    normalize = case.params.get("rollout_is_batch_normalize", False)
    log_ratio = mismatch(flat(case["old_log_prob"]), flat(case["rollout_log_prob"]), flat.mask)
    return importance_weights(log_ratio, flat.mask, flat.cu_seqlens, method, low, high, normalize)


@layouts
@parametrize("case", [c for c in CASES if "rollout_rs" in c.params and not c.raises], ids=lambda c: c.name)
def test_acceptance_mask(case: Case, layout: str) -> None:
    flat = Flat(case["response_mask"], layout)
    log_ratio = mismatch(flat(case["old_log_prob"]), flat(case["rollout_log_prob"]), flat.mask)
    accepted = flat.mask
    options = zip(
        case.params["rollout_rs"].split(","), str(case.params["rollout_rs_threshold"]).split(","), strict=True
    )
    for option, threshold in options:
        low, high = _bounds(option, threshold)
        rule = option.replace("_", "-")
        accepted = accepted & acceptance_mask(log_ratio, flat.mask, flat.cu_seqlens, rule, low, high)
    flat.check(accepted.double(), case.expected["modified_response_mask"])


def _bounds(option: str, threshold: str) -> tuple[float, float]:
    """verl bounds sampler / trainer for k1 and lets one number mean both bounds; here trainer / sampler, both given."""
    parts = [float(x) for x in threshold.split("_")]
    if not option.endswith("k1"):
        return 0.0, parts[0]
    low, high = (1.0 / parts[0], parts[0]) if len(parts) == 1 else parts
    return 1.0 / high, 1.0 / low


@layouts
@parametrize("case", [c for c in CASES if not c.raises], ids=lambda c: c.name)
def test_metrics(case: Case, layout: str) -> None:
    flat, expected = Flat(case["response_mask"], layout), case.expected
    log_ratio = mismatch(flat(case["old_log_prob"]), flat(case["rollout_log_prob"]), flat.mask)
    metrics = mismatch_metrics(log_ratio, flat.mask, flat.cu_seqlens)
    close(metrics["mismatch/kl"], expected["metrics.rollout_corr/kl"])
    if log_ratio.abs().max() <= 20:  # beyond, verl's estimator is not clamped and this one is
        close(metrics["mismatch/k3"], expected["metrics.rollout_corr/k3_kl"])
    if "rollout_is" not in case.params:
        return
    weights = _weights(case, flat)
    if not case.params.get("rollout_is_batch_normalize"):  # verl measures before that
        close(masked_mean(weights, flat.mask), expected["metrics.rollout_corr/rollout_is_mean"])
    if torch.equal(weights, log_ratio.exp() * flat.mask):  # nothing truncated: the sample size of the plain ratios
        close(metrics["mismatch/ess"], expected["metrics.rollout_corr/rollout_is_eff_sample_size"])


@layouts
def test_where_verl_raises(layout: str) -> None:
    """No response token, and a step of which IcePop keeps nothing: defined here, as zeros."""
    raising = {c.name: c for c in CASES if c.raises}
    assert set(raising) == {"all_masked", "icepop_seq_large"}
    masked, large = raising["all_masked"], raising["icepop_seq_large"]
    flat = Flat(masked["response_mask"], layout)
    log_ratio = mismatch(flat(masked["old_log_prob"]), flat(masked["rollout_log_prob"]), flat.mask)
    metrics = mismatch_metrics(log_ratio, flat.mask, flat.cu_seqlens)
    assert metrics.pop("mismatch/ess") == 1.0 and set(metrics.values()) == {0.0}
    assert (_weights(large, Flat(large["response_mask"], layout)) == 0).all()
