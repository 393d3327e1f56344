"""Maps of whole and row-cut tensors: every element once over the ranks, at any number of them."""

from __future__ import annotations

import pytest
import torch

from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.coverage import check_local_coverage
from hpc_rl.tensors.cut_map import row_shard_map, rows_of, whole_shard_map

SPEC = ModelSpec.from_hf_config(
    {
        "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 12, "intermediate_size": 20, "vocab_size": 37,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }
)  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 16, 64])
def test_rows_are_cut_as_torch_cuts_them(world_size: int) -> None:
    for name, shape in SPEC.tensors().items():
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        chunks = torch.chunk(whole, world_size)
        for rank in range(world_size):
            low, high = rows_of(shape[0], rank, world_size)
            expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert torch.equal(whole[low:high], expected), f"{name}, rank {rank}"


@pytest.mark.parametrize("world_size", [1, 3, 64])
def test_every_element_is_on_one_rank(world_size: int) -> None:
    total = 0
    for rank in range(world_size):
        shard_map = row_shard_map(SPEC, rank, world_size)
        numels = {p.local: p.numel for p in shard_map.pieces}
        check_local_coverage(shard_map, numels)
        total += sum(numels.values())
    assert total == SPEC.num_params


def test_whole_tensors() -> None:
    shard_map = whole_shard_map(SPEC.with_role("critic"), "float32")
    check_local_coverage(shard_map, {p.local: p.numel for p in shard_map.pieces})
    assert {p.name: p.shape for p in shard_map.pieces} == dict(SPEC.with_role("critic").tensors())
    assert {s.dtype for s in shard_map.specs.values()} == {"float32"}
