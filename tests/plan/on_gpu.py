"""Run on one GPU: peaks of training that torch reports, beside the plan's. `python -m tests.plan.on_gpu`; about 30 s.

Not a test that pytest collects: it needs a GPU of 80 GB. Exit code 1 if a peak is more than 10% off.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import torch

from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.state import ParallelState
from hpc_rl.plan.activations import cut_of, forward_bytes, stage_of, training_bytes
from hpc_rl.plan.hardware import GB
from hpc_rl.plan.static import static_bytes
from tests.plan.engines import batch_of, engine_of, loss
from tests.plan.jobs import QWEN2_1B, config_of, job_of
from tests.ranks import free_port

HALF = {**QWEN2_1B, "num_hidden_layers": 14}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "10240 tokens": ("actor", QWEN2_1B, {}),
    "20480 tokens": ("actor", QWEN2_1B, {"tokens": 20480}),
    "recompute": ("actor", QWEN2_1B, {"recompute": "full"}),
    "critic": ("critic", QWEN2_1B, {}),
    "no grouped queries": ("actor", {**HALF, "model_type": "llama", "num_key_value_heads": 12}, {}),
    "qwen3": ("actor", {**HALF, "model_type": "qwen3"}, {}),
    "large vocabulary": ("actor", {**HALF, "vocab_size": 152064}, {}),
    "float32": ("actor", {**HALF, "num_hidden_layers": 4}, {"dtype": "float32", "tokens": 5120}),
}


def measure(
    role: str, hf: dict[str, Any], values: dict[str, Any], state: ParallelState
) -> list[tuple[str, float, float]]:
    """(what, measured, planned) in GB."""
    config = config_of(hf, **{"dtype": "bfloat16", "tokens": 10240, "prompts": 64, "length": 640, **values})
    job = job_of(config, gpu="h100")
    spec, cut, tokens = job.roles[role], cut_of(job), config.algorithm.micro_batch_tokens
    stage = stage_of(job, spec, 0)
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    engine = engine_of(role, config, state)
    static = torch.cuda.memory_allocated() - base
    batch = batch_of(64, 640, spec.vocab_size)
    torch.cuda.reset_peak_memory_stats()
    engine.forward(batch)
    forward = torch.cuda.max_memory_allocated() - base - static
    torch.cuda.reset_peak_memory_stats()
    engine.train_batch(batch, loss)
    peak = torch.cuda.max_memory_allocated() - base
    print(f"  {torch.cuda.max_memory_reserved() / GB:.2f} GB reserved by the allocator")
    engine.close()
    planned = static_bytes(job, role, 0).total
    update = planned + sum(training_bytes(spec, cut, stage, tokens, 1))
    rows = [("static", static, planned), ("update", peak, update)]
    return [(what, got / GB, plan / GB) for what, got, plan in rows] + [
        ("(forward)", forward / GB, forward_bytes(spec, cut, stage, tokens) / GB)
    ]


def main() -> int:
    """Prints a line per peak; returns the exit code."""
    if not torch.cuda.is_available():
        print("no GPU here")
        return 1
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    state = parallel_state.initialize(config_of(QWEN2_1B), torch.device("cuda", 0))
    failed = False
    for name, (role, hf, values) in CASES.items():
        print(name)
        for what, got, plan in measure(role, hf, values, state):
            print(f"  {what}: {got:.2f} GB measured, {plan:.2f} planned ({plan / got - 1:+.1%})", flush=True)
            failed |= not what.startswith("(") and abs(plan / got - 1) > 0.10
    parallel_state.destroy()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
