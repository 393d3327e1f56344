"""This rank's share of a batch that every rank holds whole, and what all ranks make of each other's results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hpc_rl.batch import Batch
from hpc_rl.data.packing import micro_batches, partition
from hpc_rl.errors import NotFiniteError
from hpc_rl.parallel.collectives import gather_objects, merge
from hpc_rl.parallel.state import ParallelState


def micro_batch_shares(batch: Batch, state: ParallelState, token_budget: int) -> list[list[int]]:
    """This DP rank's micro-batches (sequence indices); every rank computes the same plan, of equal counts."""
    together = 2 if "pair_ids" in batch else 1
    lengths = batch.lengths.view(-1, together).sum(dim=1).tolist()
    ranks = partition(lengths, state.layout.dp)
    mine = micro_batches(lengths, ranks, token_budget)[state.dp_rank]
    return [[unit * together + k for unit in units for k in range(together)] for units in mine]


def whole(
    names: Sequence[str], batch: Batch, shares: Sequence[Sequence[int]], outputs: Sequence[Tensor], state: ParallelState
) -> dict[str, Tensor]:
    """Outputs [k, t] of this rank's micro-batches -> those of all: name -> float32 [N] on the CPU of every rank."""
    merged = torch.zeros(len(names), batch.num_tokens, device=state.device)
    if state.owns_outputs:
        for indices, output in zip(shares, outputs, strict=True):
            if indices:
                merged[:, _token_index(batch, indices).to(merged.device)] = output
    return dict(zip(names, merge(merged).cpu(), strict=True))


def reduce(sums: Sequence[dict[str, Tensor]], state: ParallelState) -> dict[str, float]:
    """Adds the sums of all micro-batches and DP ranks. A rank with empty micro-batches only knows fewer names."""
    totals: dict[str, Tensor] = {}
    if state.owns_outputs:
        for part in sums:
            for name, value in part.items():
                totals[name] = totals.get(name, torch.zeros((), device=value.device)) + value
    names = sorted(set().union(*gather_objects(sorted(totals))))
    zero = torch.zeros((), device=state.device)
    values = merge(torch.stack([totals.get(n, zero).float() for n in names]))
    return dict(zip(names, values.tolist(), strict=True))


def check_finite(
    role: str, loss: float, norm: float, batch: Batch, shares: Sequence[Sequence[int]],
    sums: Sequence[dict[str, Tensor]], gradients: Iterable[tuple[str, Tensor]], state: ParallelState,
) -> None:  # fmt: skip
    """Raises on every rank, naming where it arose, while the weights are still those of before the step."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    found: list[str] = []
    if state.owns_outputs:
        for indices, part in zip(shares, sums, strict=True):
            bad = sorted(k for k, v in part.items() if not bool(torch.isfinite(v)))
            if bad:
                prompts = sorted(set(batch["prompt_ids"][indices].tolist()))[:8] if "prompt_ids" in batch else []
                found.append(f"{', '.join(bad)} of prompts {prompts}")
    if not found:
        found = [f"gradient of {name}" for name, g in gradients if not bool(torch.isfinite(g).all())][:4]
    where = [f"rank {r}: {text}" for r, texts in enumerate(gather_objects(found)) for text in texts[:4]]
    where.sort(key=lambda text: ": loss of prompts" not in text)  # the cause before what it did to the gradients
    where = where if len(where) <= 4 else [*where[:4], f"and {len(where) - 4} more"]
    raise NotFiniteError(
        f"{role}: loss is {loss}, gradient norm is {norm}, both must be finite; the weights were not changed. "
        f"Not finite: {'; '.join(where) or 'the sum over ranks'}. Lower {role}.lr, or look at these prompts."
    )


def _token_index(batch: Batch, indices: Sequence[int]) -> Tensor:
    """Positions of all tokens of the given sequences, in that order."""
    starts, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    return torch.cat([torch.arange(starts[i], ends[i]) for i in indices])
