"""Token-flat ragged batches: no padding exists, so no padding bug does.

A batch of B sequences with N tokens in all is a set of flat ``[N]`` arrays plus ``cu_seqlens [B + 1]``:
sequence b is ``x[cu_seqlens[b]:cu_seqlens[b + 1]]``. Every per-token array is aligned with the token it speaks of:
``old_log_probs[i]`` is log p(input_ids[i] | the tokens before i in its sequence) and ``values[i]`` is the value of
the state *before* token i was chosen; both are 0 at the first token of a sequence, which nothing predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# What each name holds. [N] per token, [B] per sequence. Shared with the HDF5 files.
TOKEN_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,  # 0, 1, 2, ... within each sequence
    "response_mask": torch.bool,  # True where the token was sampled by the policy
    "rollout_log_probs": torch.float32,  # by the sampler, when it chose the token
    "old_log_probs": torch.float32,  # by the trainer, before the update
    "ref_log_probs": torch.float32,  # by the frozen reference policy
    "values": torch.float32,
    "token_level_scores": torch.float32,  # raw reward
    "token_level_rewards": torch.float32,  # after the KL penalty, if that is in the reward
    "advantages": torch.float32,
    "returns": torch.float32,
    "loss_weights": torch.float32,  # what a token's loss counts in the mini-batch's loss (algo/losses.py)
    "value_loss_weights": torch.float32,  # 1 / response tokens: of the critic's loss, and of metrics
}
SEQUENCE_DTYPES = {
    "prompt_ids": torch.int64,  # as in the prompt file
    "group_ids": torch.int64,  # samples of one prompt in one step share it: 0 .. number of prompts - 1
    "sample_ids": torch.int64,  # 0 .. samples_per_prompt - 1 within a group
    "finished": torch.bool,  # ended by itself (EOS or stop), not by the length limit
    "versions": torch.int64,  # of the weights that sampled it
    "scores": torch.float32,  # the reward function's result for the whole response
    "baseline_scores": torch.float32,  # that of the greedy response to the same prompt (ReMax)
    "pair_ids": torch.int64,  # sequences 2p and 2p + 1 are a pair, which micro-batches keep together
    "pair_weights": torch.float32,  # 1 / number of pairs of the mini-batch
}


@dataclass(frozen=True, slots=True)
class Batch:
    """B whole sequences, token-flat, on one device.

    ``cu_seqlens``: int64 [B + 1], on the CPU always (it shapes the work). ``tokens``: name -> [N].
    ``sequences``: name -> [B], on the CPU.
    """

    cu_seqlens: Tensor
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    sequences: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.cu_seqlens.dim() == 1 and self.cu_seqlens.dtype == torch.int64, "cu_seqlens must be int64 [B + 1]"
        for name, value in self.tokens.items():
            assert value.shape[:1] == (self.num_tokens,), f"{name} has {tuple(value.shape)}, not [{self.num_tokens}]"
        for name, value in self.sequences.items():
            assert value.shape[:1] == (len(self),), f"{name} has {tuple(value.shape)}, not [{len(self)}]"

    def __len__(self) -> int:
        """Number of sequences, B."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """int64 [B], tokens of each sequence."""
        return self.cu_seqlens.diff()

    def __getitem__(self, name: str) -> Tensor:
        return self.tokens[name] if name in self.tokens else self.sequences[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    def with_tokens(self, **arrays: Tensor) -> Batch:
        """A batch with per-token arrays added or replaced."""
        return Batch(self.cu_seqlens, {**self.tokens, **arrays}, self.sequences)

    def with_sequences(self, **arrays: Tensor) -> Batch:
        """A batch with per-sequence arrays added or replaced."""
        return Batch(self.cu_seqlens, self.tokens, {**self.sequences, **arrays})

    def sequence_index(self) -> Tensor:
        """int64 [N]: which sequence each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """The sequences at ``indices``, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[index]
        cu_seqlens = cumulative(lengths)
        shifts = self.cu_seqlens[:-1][index] - cu_seqlens[:-1]
        token_index = torch.arange(int(cu_seqlens[-1])) + shifts.repeat_interleave(lengths)
        tokens = {k: v[token_index.to(v.device)] for k, v in self.tokens.items()}
        return Batch(cu_seqlens, tokens, {k: v[index] for k, v in self.sequences.items()})

    def to(self, device: torch.device | str) -> Batch:
        """Per-token arrays moved to ``device``; the rest stays on the CPU."""
        return Batch(
            self.cu_seqlens, {k: v.to(device, non_blocking=True) for k, v in self.tokens.items()}, self.sequences
        )

    @staticmethod
    def concat(batches: Iterable[Batch]) -> Batch:
        """All sequences of ``batches``, in order. Each must hold the same names."""
        parts = list(batches)
        assert parts, "concat needs at least one batch"
        cu_seqlens = cumulative(torch.cat([b.lengths for b in parts]))
        tokens = {k: torch.cat([b.tokens[k] for b in parts]) for k in parts[0].tokens}
        return Batch(cu_seqlens, tokens, {k: torch.cat([b.sequences[k] for b in parts]) for k in parts[0].sequences})


def cumulative(lengths: Tensor) -> Tensor:
    """int64 [B] lengths -> int64 [B + 1] offsets."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
