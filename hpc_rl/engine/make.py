"""The one place that knows the training engines by name."""

from __future__ import annotations

from hpc_rl.config import Config, OptimizerConfig
from hpc_rl.engine.fsdp2 import FSDP2Engine
from hpc_rl.engine.megatron import MegatronEngine
from hpc_rl.engine.zero import ZeroEngine
from hpc_rl.parallel.state import ParallelState
from hpc_rl.tensors.canonical import ModelSpec

Engine = MegatronEngine | FSDP2Engine | ZeroEngine
ENGINES: dict[str, type[MegatronEngine] | type[FSDP2Engine] | type[ZeroEngine]] = {
    "megatron": MegatronEngine,
    "fsdp2": FSDP2Engine,
    "zero1": ZeroEngine,
    "zero2": ZeroEngine,
}


def make_engine(
    role: str, spec: ModelSpec, config: Config, state: ParallelState, *, optimizer: OptimizerConfig | None,
    total_steps: int = 1,
) -> Engine:  # fmt: skip
    """The engine that ``parallel.engine`` names, for one role; its weights are undefined until written.

    Args: as of `MegatronEngine`.
    """
    return ENGINES[config.parallel.engine](role, spec, config, state, optimizer=optimizer, total_steps=total_steps)
