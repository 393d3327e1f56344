"""Random steps for the tests: token-flat batches with prompts, holes, empty responses and groups of unequal size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_rl.algo.registry import ALGORITHMS
from hpc_rl.algo.step import mini_batches, policy_loss, prepare, value_loss
from hpc_rl.batch import Batch, cumulative
from hpc_rl.config import AlgorithmConfig, Config, RolloutConfig

NAMES = tuple(ALGORITHMS)
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MAX_RESPONSE_TOKENS = 16
FLOATS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "token_level_scores")


def make_config(name: str, **algorithm: Any) -> Config:
    """The algorithm with its published values, and ``algorithm`` above them."""
    return Config(
        rollout=RolloutConfig(samples_per_prompt=4, max_response_tokens=MAX_RESPONSE_TOKENS),
        algorithm=AlgorithmConfig(name=name, **{**ALGORITHMS[name].defaults, **algorithm}),
    )


def full_config(name: str, **algorithm: Any) -> Config:
    """Everything on: KL loss or reward, entropy, overlong penalty, correction, rejection."""
    extras = {
        "kl_placement": "loss" if len(name) % 2 else "reward",
        "kl_estimator": "k3",
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "overlong_buffer_tokens": 8,
        "correction": "tis-sequence",
        "reject": "seq-max-k3",
        "reject_high": 0.3,
    }
    return make_config(name, **{**extras, **algorithm})


def make_batch(seed: int, num_sequences: int = 6, dtype: torch.dtype = torch.float64, empty: bool = True) -> Batch:
    """``num_sequences`` sequences of 1 to 12 tokens; the second one's response is empty if ``empty``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (num_sequences,), generator=generator)
    cu_seqlens = cumulative(lengths)
    num_tokens = int(cu_seqlens[-1])
    mask = torch.rand(num_tokens, generator=generator) < 0.7  # holes, as between the turns of a dialogue
    mask[cu_seqlens[:-1]] = False  # a first token is always prompt
    if empty and num_sequences > 1:
        mask[cu_seqlens[1] : cu_seqlens[2]] = False

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)

    old = -normal(num_tokens).abs()
    tokens = {
        "input_ids": torch.randint(0, 9, (num_tokens,), generator=generator),
        "response_mask": mask,
        "old_log_probs": old,
        "rollout_log_probs": old + 0.2 * normal(num_tokens),
        "ref_log_probs": old + 0.5 * normal(num_tokens),
        "values": normal(num_tokens),
        "token_level_scores": torch.where(mask, normal(num_tokens), 0),
    }
    sequences = {
        "group_ids": torch.randint(0, max(1, num_sequences // 2), (num_sequences,), generator=generator),
        "scores": normal(num_sequences),
        "finished": torch.rand(num_sequences, generator=generator) < 0.5,
        "baseline_scores": normal(num_sequences),
    }
    return Batch(cu_seqlens, tokens, sequences)


def outputs_of(batch: Batch, seed: int = 1) -> dict[str, Tensor]:
    """What a model might say of each token: depends on the token's own old values alone."""
    old = batch["old_log_probs"].clamp(min=-10.0)  # a test may set it to -inf
    shift = torch.sin(37.0 * old + seed)
    return {
        "log_probs": old + 0.4 * shift,
        "entropy": 1.0 + 0.3 * shift,
        "values": batch["values"] + 0.3 * shift,
    }


def losses_and_gradients(part: Batch, config: Config, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, metrics and gradients (grad/<output>, [N]) of actor and critic on one (micro-)batch."""
    leaves = {name: value.clone().requires_grad_(True) for name, value in outputs.items()}
    result: dict[str, Tensor] = {}
    loss, metrics = policy_loss(config, config.algorithm.kl_coef)(leaves, part)
    value, value_metrics = value_loss(config)(leaves, part)
    (loss + value).backward()
    result |= {"loss": loss.detach(), **metrics, **value_metrics}
    return result | {f"grad/{k}": torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}


def whole_step(batch: Batch, config: Config) -> tuple[Batch, dict[str, float]]:
    """Prepared, and weighted as one mini-batch in the order of ``batch``."""
    prepared, metrics = prepare(batch, config, config.algorithm.kl_coef)
    prepared = prepared.with_sequences(position=torch.arange(len(batch)))
    (part,) = mini_batches(prepared, config, torch.Generator().manual_seed(0))
    return part.select(part["position"].argsort()), metrics
