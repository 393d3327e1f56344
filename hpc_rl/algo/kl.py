"""KL divergence to the reference policy, per token and from samples of the policy; and its coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_rl.algo.masked import LOG_RATIO_MAX, keep_log_probs
from hpc_rl.config import AlgorithmConfig

K3_MAX = 10.0  # bounds one token's k3 term and, past a log-ratio of about 2.6, stops its gradient


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    estimator: str,
    straight_through: bool = False,
    k3_max: float | None = K3_MAX,
) -> Tensor:
    """Estimate of KL(policy || reference) at each token, zeros outside the mask.

    With d = log_probs - ref_log_probs: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, gradient unbiased),
    k3 = exp(-d) - 1 + d (unbiased, never negative; -d clamped to +-20, the result to ``k3_max``).

    Args:
        log_probs, ref_log_probs: [N] float, of the sampled tokens.
        mask: [N] bool.
        estimator: k1, k2 or k3.
        straight_through: keep the value but take k2's gradient, which estimates that of the KL; k1's is 0 on average.
        k3_max: upper bound of k3; None: none.
    Returns: [N].
    Source: J. Schulman, "Approximating KL divergence", 2020; gradients: arXiv 2506.09477.
    """
    difference = keep_log_probs(log_probs, mask) - keep_log_probs(ref_log_probs, mask)
    squared = 0.5 * difference.square()
    if estimator == "k1":
        value = difference
    elif estimator == "k2":
        value = squared
    else:
        assert estimator == "k3", f"estimator {estimator!r} is not k1, k2 or k3"
        negated = (-difference).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        value = torch.expm1(negated) - negated
        value = value if k3_max is None else value.clamp(max=k3_max)
    return value.detach() + (squared - squared.detach()) if straight_through else value


class KLController:
    """The KL coefficient: fixed (kl_target null), or moved towards kl_target.

    coef <- coef (1 + clip(kl / kl_target - 1, -0.2, 0.2) n / kl_horizon), n = sequences of the step.
    The KL is the mean over all response tokens (verl: over sequences, of each one's mean, empty ones as 0), so that it
    is what the penalty sums up. Source: arXiv 1909.08593, section 2.2.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coef, self.target, self.horizon = config.kl_coef, config.kl_target, config.kl_horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """After a step whose mean KL per token was ``kl`` (nats, global)."""
        if self.target is None:
            return
        assert math.isfinite(kl), f"a KL of {kl} cannot steer the coefficient"
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, Any]:
        """What a resume needs (JSON)."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state`` gave; a fixed coefficient stays the configuration's."""
        if self.target is not None:
            self.coef = float(state["coef"])
