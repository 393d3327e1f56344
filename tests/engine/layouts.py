"""What one rank does in the parity tests; results come back as plain tensors, complete on rank 0."""

from __future__ import annotations

from typing import Any

import torch

from hpc_rl.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, ParallelConfig
from hpc_rl.engine.megatron import MegatronEngine
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import gather_objects
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.shardmap import view
from tests.engine.reference import CLIP, LR, STEPS, WEIGHT_DECAY, Truth, batch_of, loss_of


def config_of(micro_batch_tokens: int = 1000, **parallel: Any) -> Config:
    optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    return Config(
        model=ModelConfig(dtype="float32", config={}),
        parallel=ParallelConfig(**parallel),
        algorithm=AlgorithmConfig(micro_batch_tokens=micro_batch_tokens),
        actor=optimizer,
        critic=optimizer,
    )


def fill(engine: MegatronEngine, tensors: dict[str, torch.Tensor]) -> None:
    """Writes whole canonical tensors into the engine's shards."""
    shard_map, local = engine.shard_map()
    for piece in shard_map.pieces:
        source = tensors[piece.name][tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))]
        view(piece, local[piece.local]).copy_(source)
    engine.parameters_changed()


def whole(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Every canonical tensor, from all ranks' shards."""
    shard_map, local = engine.shard_map()
    mine = [(p.name, p.start, p.shape, view(p, local[p.local]).clone()) for p in shard_map.pieces]
    out = {n: torch.full(shape, torch.nan) for n, shape in engine.spec.tensors().items()}
    for parts in gather_objects(mine):
        for name, start, shape, value in parts:
            out[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))] = value
    return out


def train_actor(truth: Truth, config: Config) -> dict[str, Any]:
    """Scores once, trains STEPS steps; the actor's view of the reference run."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    spec = ModelSpec.from_hf_config(truth.config)
    engine = MegatronEngine("actor", spec, config, state, optimizer=config.actor, total_steps=STEPS)
    fill(engine, truth.initial)
    outputs = engine.forward(batch_of(0))
    losses, norms = [], []
    for step in range(STEPS):
        metrics = engine.train_batch(batch_of(step), lambda out, b: (loss_of(out["log_probs"], out["entropy"], b), {}))
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    result = {**outputs, "losses": losses, "grad_norms": norms, "final": whole(engine)}
    parallel_state.destroy()
    return result
