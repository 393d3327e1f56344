"""What one rank does in the parity tests; results come back as plain tensors, complete on rank 0."""

from __future__ import annotations

from typing import Any

import torch

from hpc_rl.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, ParallelConfig
from hpc_rl.engine.make import Engine, make_engine
from hpc_rl.errors import RunError
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import gather_objects
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.coverage import check_local_coverage
from hpc_rl.tensors.shardmap import view
from tests.engine.reference import CLIP, LR, STEPS, WEIGHT_DECAY, Truth, batch_of, loss_of


def config_of(micro_batch_tokens: int = 1000, dtype: Any = "float32", **parallel: Any) -> Config:
    optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    return Config(
        model=ModelConfig(dtype=dtype, config={}),
        parallel=ParallelConfig(**parallel),
        algorithm=AlgorithmConfig(micro_batch_tokens=micro_batch_tokens),
        actor=optimizer,
        critic=optimizer,
    )


def fill(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    """Writes whole canonical tensors into the engine's shards."""
    shard_map, local = engine.shard_map()
    for piece in shard_map.pieces:
        source = tensors[piece.name][tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))]
        view(piece, local[piece.local]).copy_(source)
    engine.parameters_changed()


def whole(engine: Engine) -> dict[str, torch.Tensor]:
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
    engine = make_engine("actor", spec, config, state, optimizer=config.actor, total_steps=STEPS)
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


def train_critic(truth: Truth, config: Config) -> dict[str, Any]:
    """Values before, losses and gradient norms of STEPS steps of a critic whose backbone is the reference's."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    spec = ModelSpec.from_hf_config(truth.config)
    engine = make_engine("critic", spec, config, state, optimizer=config.critic, total_steps=STEPS)
    fill(engine, {**truth.initial, "value_head.weight": value_head(spec.hidden_size)})
    values = engine.forward(batch_of(0))["values"]
    losses, norms = [], []
    for step in range(STEPS):
        metrics = engine.train_batch(batch_of(step), lambda out, b: (critic_loss(out["values"], b), {}))
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    result = {"values": values, "losses": losses, "grad_norms": norms, "final": whole(engine)}
    parallel_state.destroy()
    return result


def value_head(hidden_size: int) -> torch.Tensor:
    return torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(3)) * 0.1


def critic_loss(values: torch.Tensor, batch: Any) -> torch.Tensor:
    target = (batch["input_ids"] % 7).float() / 7
    return (batch["loss_weights"] * (values - target) ** 2).sum()


def keep_and_restore(truth: Truth, config: Config) -> bool:
    """Two steps; state kept; a third; state put back into a fresh engine; the third again: bitwise the same?"""
    state = parallel_state.initialize(config, torch.device("cpu"))
    spec = ModelSpec.from_hf_config(truth.config)

    def make() -> Engine:
        engine = make_engine("actor", spec, config, state, optimizer=config.actor, total_steps=STEPS)
        fill(engine, truth.initial)
        return engine

    def step(engine: Engine, i: int) -> dict[str, float]:
        return engine.train_batch(batch_of(i), lambda out, b: (loss_of(out["log_probs"], out["entropy"], b), {}))

    first = make()
    step(first, 0), step(first, 1)
    _, tensors, values = first.state()
    kept = {k: v.clone() for k, v in tensors.items()}
    metrics = step(first, 2)
    second = make()
    for name, tensor in second.state()[1].items():
        tensor.copy_(kept[name])
    second.load_state(values)
    again = step(second, 2)
    after, restored = first.state()[1], second.state()[1]
    same = metrics == again and all(torch.equal(after[k], restored[k]) for k in after)
    parallel_state.destroy()
    return same


def covered(truth: Truth, config: Config) -> list[tuple[str, int]]:
    """(canonical state name, elements) of this rank's state, after proving that every local element is covered."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    spec = ModelSpec.from_hf_config(truth.config)
    engine = make_engine("actor", spec, config, state, optimizer=config.actor, total_steps=STEPS)
    shard_map, tensors, _ = engine.state()
    check_local_coverage(shard_map, {k: t.numel() for k, t in tensors.items()})
    parallel_state.destroy()
    return [(p.name, p.numel) for p in shard_map.pieces]


def nan_step(truth: Truth, config: Config) -> tuple[str, bool]:
    """The error of a step whose loss is NaN, and whether the weights stayed as they were."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    engine = make_engine(
        "actor", ModelSpec.from_hf_config(truth.config), config, state, optimizer=config.actor, total_steps=STEPS
    )
    fill(engine, truth.initial)
    before = {k: v.clone() for k, v in engine.shard_map()[1].items()}
    poisoned = batch_of(0)
    weights = poisoned["loss_weights"].clone()
    weights[poisoned["response_mask"].nonzero()[0]] = torch.nan
    try:
        engine.train_batch(
            poisoned.with_tokens(loss_weights=weights),
            lambda out, b: (loss_of(out["log_probs"], out["entropy"], b), {}),
        )
        message = "no error"
    except RunError as error:
        message = str(error)
    same = all(torch.equal(v, before[k]) for k, v in engine.shard_map()[1].items())
    parallel_state.destroy()
    return message, same
