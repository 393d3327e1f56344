"""A micro-batch as a model sees it: one packed row of tokens, and what attention and the head need to know of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpc_rl.batch import Batch, cumulative


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole sequences packed into one row. Passed to Megatron in the place of its PackedSeqParams.

    ``qkv_format`` is not "thd": queries keep [t, 1, heads, dim], positions come from `position_ids`, and only the
    core attention looks at the sequence bounds.
    """

    input_ids: Tensor  # int64 [1, t]
    position_ids: Tensor  # int64 [1, t]
    cu_seqlens: Tensor  # int32 [b + 1], device
    max_seqlen: int
    pad_index: Tensor | None  # int64 [b * max_seqlen]: padded slot -> token (t for an empty slot); None: varlen kernel
    token_index: Tensor | None  # int64 [t]: token -> padded slot
    predict_from: Tensor  # int64 [m]: position whose hidden state predicts each counted token
    predict_at: Tensor  # int64 [m]: position of each counted token
    targets: Tensor  # int64 [m]: the counted tokens
    num_tokens: int  # t without the padding that sequence parallelism asks for
    cos_sin: tuple[Tensor, Tensor] | None = None  # float32 [t, head_dim / 2] each, of the rotary angles
    qkv_format: str = "packed"

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    def with_frequencies(self, inv_freq: Tensor, dtype: torch.dtype) -> Packed:
        """With the rotary angles of its positions, rounded to the model's ``dtype`` as HF and vLLM round them."""
        angles = self.position_ids[0].float()[:, None] * inv_freq
        return replace(self, cos_sin=(angles.cos().to(dtype).float(), angles.sin().to(dtype).float()))

    def spread(self, outputs: list[Tensor]) -> Tensor:
        """Values of the counted tokens, k times [m] -> float32 [k, t], 0 at all other tokens."""
        flat = outputs[0].new_zeros(len(outputs), self.input_ids.shape[1], dtype=torch.float32)
        return flat.index_copy(1, self.predict_at, torch.stack(outputs).float())

    def angles(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the rotary angles."""
        assert self.cos_sin is not None, "with_frequencies comes first"
        return self.cos_sin


def pack(batch: Batch, device: torch.device, multiple_of: int, padded: bool) -> Packed:
    """Packs a micro-batch. A dummy sequence at the end rounds the length up to ``multiple_of`` (at least one token).

    Counted tokens are those of the response mask; a response token always has a token before it. ``padded``: for
    attention on padded rows (CPU, float32), else for the varlen kernel.
    """
    lengths = batch.lengths
    total = max(1, batch.num_tokens)
    padding = -total % multiple_of + (total - batch.num_tokens)
    if padding:
        lengths = torch.cat([lengths, torch.tensor([padding])])
    zeros = torch.zeros(padding, dtype=torch.int64)
    cu_seqlens = cumulative(lengths)
    max_seqlen = int(lengths.max())
    predict_at = batch["response_mask"].nonzero()[:, 0] if len(batch) else torch.zeros(0, dtype=torch.int64)
    input_ids = torch.cat([batch["input_ids"], zeros]) if len(batch) else zeros
    position_ids = torch.cat([batch["position_ids"], zeros]) if len(batch) else zeros
    pad_index = token_index = None
    if padded:
        t = int(cu_seqlens[-1])
        start = torch.arange(len(lengths)) * max_seqlen
        token_index = torch.arange(t) + (start - cu_seqlens[:-1]).repeat_interleave(lengths)
        pad_index = torch.full((len(lengths) * max_seqlen,), t)
        pad_index[token_index] = torch.arange(t)

    def send(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    return Packed(
        input_ids=send(input_ids[None]),
        position_ids=send(position_ids[None]),
        cu_seqlens=send(cu_seqlens.to(torch.int32)),
        max_seqlen=max_seqlen,
        pad_index=send(pad_index) if pad_index is not None else None,
        token_index=send(token_index) if token_index is not None else None,
        predict_from=send(predict_at - 1),
        predict_at=send(predict_at),
        targets=send(input_ids[predict_at]),
        num_tokens=batch.num_tokens,
    )
