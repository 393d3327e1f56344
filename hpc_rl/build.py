"""From a configuration to the parts of a job: ranks, models, sampler, storage. Everything heavy starts here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_rl import rng
from hpc_rl.algo.registry import algorithm
from hpc_rl.config import Config
from hpc_rl.config_check import cross_check
from hpc_rl.config_load import dump_config
from hpc_rl.data.prompts import PromptStream, load_prompts
from hpc_rl.engine.colocate import Colocation
from hpc_rl.engine.megatron import MegatronEngine
from hpc_rl.errors import UserError
from hpc_rl.metrics.sinks import Sinks
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import agree, barrier, gather_objects
from hpc_rl.parallel.state import ParallelState
from hpc_rl.reshard.execute import Resharder
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.vllm import VLLMEngine
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.hf import load_into, open_source


@dataclass
class Job:
    """The parts of one run on this rank. ``critic`` and ``reference`` are None where the algorithm has no use for them."""

    config: Config
    parallel: ParallelState
    prompts: PromptStream
    actor: MegatronEngine
    critic: MegatronEngine | None
    reference: MegatronEngine | None
    sampler: VLLMEngine
    reward: RewardFunction
    resharder: Resharder
    colocation: Colocation
    checkpointer: Checkpointer
    sinks: Sinks
    resume_from: Path | None

    def close(self) -> None:
        """Ends writers and leaves the process group."""
        self.checkpointer.close()
        self.sampler.close()
        parallel_state.destroy()


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises UserError if a GPU is asked for and none is there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.launch.device == "cpu" or (config.launch.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise UserError("launch.device is cuda, but torch sees no GPU: set launch.device=cpu, or use a CUDA build of torch")
    if local_rank >= count:
        raise UserError(f"local rank {local_rank} has no GPU: this node has {count}; start at most {count} ranks on it")
    return torch.device("cuda", local_rank)
