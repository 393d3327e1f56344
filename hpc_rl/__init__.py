"""hpc_rl: reinforcement-learning post-training of LLMs as a batch job on HPC clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_rl.version import __version__

if TYPE_CHECKING:
    from hpc_rl.api import ActorModel, CriticModel, RewardModel
    from hpc_rl.config_load import load_config
    from hpc_rl.train import RLTrainer

__all__ = ["ActorModel", "CriticModel", "RLTrainer", "RewardModel", "__version__", "load_config"]
_HOMES = {
    "ActorModel": "hpc_rl.api",
    "CriticModel": "hpc_rl.api",
    "RewardModel": "hpc_rl.api",
    "RLTrainer": "hpc_rl.train",
    "load_config": "hpc_rl.config_load",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for, so that `hpc-rl --help` and the planner need neither torch nor Megatron."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hpc_rl' has no attribute {name!r}: it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
