"""Random weights of a model that comes from a config alone, the same at every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from hpc_rl.tensors.canonical import VALUE_HEAD, ModelSpec
from hpc_rl.tensors.shardmap import ShardMap, view


@torch.no_grad()
def fill_random(shard_map: ShardMap, tensors: Mapping[str, Tensor], spec: ModelSpec, seed: int) -> None:
    """Norms 1, biases and a value head 0, all else normal with ``initializer_range``.

    Each canonical tensor is drawn whole from its own seed and cut, so that no layout shows in the weights. One whole
    tensor exists at a time, on the device of the local tensor.
    """
    by_name: dict[str, list[int]] = {}
    for index, piece in enumerate(shard_map.pieces):
        by_name.setdefault(piece.name, []).append(index)
    for name, indices in by_name.items():
        device = tensors[shard_map.pieces[indices[0]].local].device
        whole = draw(name, spec, seed, device)
        for piece in (shard_map.pieces[i] for i in indices):
            box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            view(piece, tensors[piece.local]).copy_(whole[box])


def draw(name: str, spec: ModelSpec, seed: int, device: torch.device) -> Tensor:
    """One canonical tensor, whole, float32."""
    shape = spec.tensors()[name]
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(".bias") or name == VALUE_HEAD:
        return torch.zeros(shape, device=device)
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little"))
    return torch.randn(shape, generator=generator, device=device) * spec.initializer_range
