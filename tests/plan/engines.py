"""What real engines hold, measured on their ranks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from hpc_rl.batch import Batch, cumulative
from hpc_rl.config import Config
from hpc_rl.engine.data_parallel import DataParallelEngine
from hpc_rl.engine.head import token_log_probs
from hpc_rl.engine.make import Engine, make_engine
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import gather_objects
from hpc_rl.parallel.state import ParallelState
from hpc_rl.storage.plan import holding, plan
from hpc_rl.tensors.canonical import ModelSpec


def engine_of(role: str, config: Config, state: ParallelState) -> Engine:
    """An engine with random weights; its norms are ones."""
    optimizer = None if role == "reference" else config.actor
    spec = ModelSpec.from_hf_config(config.model.config or {})
    engine = make_engine(role, spec, config, state, optimizer=optimizer)
    with torch.no_grad():
        for parameter in engine.shard_map()[1].values():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    engine.parameters_changed()
    return engine


def batch_of(num_sequences: int, length: int, vocab_size: int) -> Batch:
    """Sequences of one length; all but the first token is response."""
    n = num_sequences * length
    position_ids = torch.arange(n) % length
    mask = position_ids > 0
    tokens = {
        "input_ids": torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(0)),
        "position_ids": position_ids,
        "response_mask": mask,
        "loss_weights": mask.float() / mask.sum(),
    }
    return Batch(cumulative(torch.full((num_sequences,), length)), tokens, {"prompt_ids": torch.arange(num_sequences)})


def loss(outputs: Any, micro: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Uses every output."""
    return (micro["loss_weights"] * -sum(outputs.values())).sum(), {}


def storages(tensors: Any) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def with_model(config: Config, **changes: int) -> Config:
    """The configuration with values of the model's changed."""
    return replace(config, model=replace(config.model, config={**(config.model.config or {}), **changes}))


def train_once(engine: Engine) -> None:
    """One step on a few tokens, of an engine that learns."""
    if engine.optimizer is not None:
        engine.train_batch(batch_of(2 * engine.parallel.layout.dp, 8, engine.spec.vocab_size), loss)


def process_bytes() -> int:
    """Memory of this process alone, without what malloc keeps of things freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_full_info().uss)


def held(config: Config, role: str) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer of one role after a step, and by how much the process grew."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    train_once(engine_of(role, with_model(config, num_hidden_layers=2, vocab_size=256), state))  # loads libraries
    before = process_bytes()
    engine = engine_of(role, config, state)
    out = {"pp": state.pp_rank, "weights": storages(engine.shard_map()[1].values()), "gradients": 0, "optimizer": 0}
    if isinstance(engine, DataParallelEngine) and engine.optimizer is not None:
        out |= held_by_cut_optimizer(engine)
    else:
        train_once(engine)
    if engine.optimizer is not None and not isinstance(engine, DataParallelEngine):
        out["gradients"] = storages(buffer.grad_data for buffer in engine._model.buffers)  # type: ignore[union-attr]
        weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        states = [t for s in engine.optimizer.shards() for t in (s.main, s.exp_avg, s.exp_avg_sq)]
        out["optimizer"] = storages(t for t in states if t.untyped_storage().data_ptr() not in weights)
    out["process"] = process_bytes() - before
    parallel_state.destroy()
    return out


def held_by_cut_optimizer(engine: DataParallelEngine) -> dict[str, int]:
    """Bytes of gradients just before a step, and of main weights and moments that are not the weights themselves."""
    optimizer, found = engine.optimizer, {}
    assert optimizer is not None
    step = optimizer.step

    def measure(norm: float) -> None:
        found["gradients"] = storages(g for _, g in optimizer.gradients())
        step(norm)

    optimizer.step = measure  # type: ignore[method-assign]
    train_once(engine)  # type: ignore[arg-type]
    weights = {t.untyped_storage().data_ptr() for t in engine.shard_map()[1].values()}
    states = [t for s in optimizer.shards() for t in (s.main, s.exp_avg, s.exp_avg_sq)]
    return found | {"optimizer": storages(t for t in states if t.untyped_storage().data_ptr() not in weights)}


def saved(config: Config, role: str, num_sequences: int, length: int) -> tuple[int, int]:
    """(pipeline stage, bytes that autograd saves on this rank in the forward pass of the one micro-batch)."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    engine = engine_of(role, config, state)
    weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not done:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    done: list[bool] = []  # once the backward pass has begun: recomputation saves again
    batch = batch_of(num_sequences, length, engine.spec.vocab_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for module in engine.module.modules():
            module.register_full_backward_pre_hook(lambda *_: done.append(True))
        engine.train_batch(batch, lambda outputs, micro: (done.append(True), loss(outputs, micro))[1])
    parallel_state.destroy()
    return state.pp_rank, sum(kept.values())


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that ``work`` has allocated at one time, as torch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    sizes: list[tuple[int, int]] = []

    def visit(event: Any) -> None:
        if event.tag == torch._C._profiler._EventType.Allocation:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
        for child in event.children:
            visit(child)

    for event in run.profiler.kineto_results.experimental_event_tree():
        visit(event)
    return max(accumulate(nbytes for _, nbytes in sorted(sizes)))


def head_peaks(tokens: int, hidden_size: int, rows: int, dtype: torch.dtype) -> tuple[int, int]:
    """Peaks of the actor's head, in its forward and its backward pass."""
    hidden, weight = (torch.randn(n, hidden_size, dtype=dtype, requires_grad=True) for n in (tokens, rows))
    targets, outputs = torch.randint(0, rows, (tokens,)), []

    def forward() -> None:
        outputs.extend(token_log_probs(hidden, weight, targets, 1.0, rows, None))

    first = peak_bytes(forward)
    total = sum(outputs).sum()  # type: ignore[union-attr]
    return first, peak_bytes(total.backward)


def checkpoint(config: Config, role: str) -> tuple[int, int]:
    """(bytes of all extents that a checkpoint of this engine writes, files)."""
    state = parallel_state.initialize(config, torch.device("cpu"))
    shard_map = engine_of(role, config, state).state()[0]
    made = plan(gather_objects(holding({role: shard_map})))
    parallel_state.destroy()
    return sum(extent.nbytes for extents in made.ranks for extent in extents), len(made.ranks)
