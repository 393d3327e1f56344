"""An engine's state by canonical name: parameters, main weights and AdamW moments, sharded as they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hpc_rl.config import Config
from hpc_rl.tensors.shardmap import Piece, ShardMap, TensorSpec, flat_range


@dataclass(frozen=True, slots=True)
class Shard:
    """What this DP rank's optimizer holds of one parameter: elements [begin, end) of the flattened local parameter."""

    param: torch.nn.Parameter
    begin: int
    end: int
    main: Tensor  # float32 [end - begin]; a view of the parameter itself when that is float32
    exp_avg: Tensor
    exp_avg_sq: Tensor


def no_moments(main: Tensor) -> dict[str, Tensor]:
    """AdamW's state before its first step. torch makes it then; made now, a checkpoint can be read into it."""
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": torch.zeros_like(main), "exp_avg_sq": torch.zeros_like(main)}


def set_steps(states: Iterable[Mapping[str, Tensor]], schedule: Any, steps: int) -> None:
    """The step count that bias correction and the schedule read, after a resume."""
    for state in states:
        state["step"].fill_(steps)
    schedule.num_steps = 0
    schedule.step(steps)


class ShardedOptimizer(Protocol):
    """AdamW whose main weights and moments lie sharded over the ranks."""

    def shards(self) -> Iterator[Shard]: ...
    def state(self) -> dict[str, int]: ...


class TrainedEngine(Protocol):
    """What `engine_state` reads of an engine."""

    role: str
    config: Config

    @property
    def module(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> ShardedOptimizer | None: ...
    def shard_map(self) -> tuple[ShardMap, Mapping[str, Tensor]]: ...


def engine_state(engine: TrainedEngine) -> tuple[ShardMap, dict[str, Tensor], dict[str, Any]]:
    """All that a resume needs.

    Names: ``param/N`` (model dtype), ``main/N`` (float32, unless the parameter is float32 itself), ``exp_avg/N`` and
    ``exp_avg_sq/N``, for each canonical N. The optimizer's are flat ranges, disjoint over DP.
    """
    assert engine.optimizer is not None, f"{engine.role} is frozen: it has no state to keep"
    params_map, params = engine.shard_map()
    specs = {f"param/{n}": s for n, s in params_map.specs.items()}
    pieces = [replace(p, name=f"param/{p.name}", local=f"param/{p.local}") for p in params_map.pieces]
    tensors = {f"param/{n}": t for n, t in params.items()}
    names = {id(p): n for n, p in engine.module.named_parameters()}
    padding = {f"param/{n}": count for n, count in params_map.padding.items()}
    by_local: dict[str, list[Piece]] = {}
    for piece in params_map.pieces:
        by_local.setdefault(piece.local, []).append(piece)
    for shard in engine.optimizer.shards():
        local = names[id(shard.param)]
        kinds = {"exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
        if engine.config.model.dtype != "float32":
            kinds["main"] = shard.main
        for kind, tensor in kinds.items():
            key = f"{kind}/{local}"
            parts = [q for p in by_local.get(local, []) for q in flat_range(p, shard.begin, shard.end, key, 0)]
            pieces += [replace(q, name=f"{kind}/{q.name}") for q in parts]
            tensors[key] = tensor
            if missing := tensor.numel() - sum(q.numel for q in parts):
                padding[key] = missing  # pad rows of the vocabulary, of no meaning
    kinds_here = ["exp_avg", "exp_avg_sq"] + (["main"] if engine.config.model.dtype != "float32" else [])
    specs |= {f"{k}/{n}": TensorSpec(s.shape, "float32") for k in kinds_here for n, s in params_map.specs.items()}
    return ShardMap(specs, tuple(pieces), padding), tensors, {"optimizer": engine.optimizer.state()}
