"""Runs against a reference that is not the actor, and what plain Hugging Face models say of the same tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.rollout.protocol import Sample
from hpc_rl.train import RLTrainer
from tests.train.runs import QUICKSTART

ACTOR = QUICKSTART.parent / "quickstart" / "model"


def write_reference(directory: Path) -> Path:
    """The quickstart's model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(ACTOR, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory)
    return directory


def plain_log_probs(directory: Path, batch: Batch, temperature: float) -> Tensor:
    """float64 [N], 0 at each first token."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    result = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for lo, hi in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids = batch["input_ids"][lo:hi]
        with torch.no_grad():
            log_p = (model(ids[None]).logits[0, :-1].double() / temperature).log_softmax(-1)
        result[lo + 1 : hi] = log_p.gather(1, ids[1:, None])[:, 0]
    return result


def run_scored(config: Config, steps: int) -> dict[str, Any]:
    """Scored batch and metrics of each step."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    batches: list[Batch] = []
    score = trainer._score

    def keep(step: int, batch: Batch) -> Batch:
        batches.append(score(step, batch))
        return batches[-1]

    trainer._score = keep  # type: ignore[method-assign]
    metrics = [trainer.step(i + 1) for i in range(steps)]
    judging = num_reward_processes()
    trainer.close()
    return {"batches": batches, "metrics": metrics, "reward_processes": (judging, num_reward_processes())}


def num_reward_processes() -> int:
    """Children of this process that run a reward function."""
    return sum("hpc_rl.reward.worker" in " ".join(child.cmdline()) for child in psutil.Process().children())


def held_out(config: Config) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, response) ids of one evaluation."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    generate, drawn = trainer.job.sampler.generate, list[Sample]()

    def keep(*args: Any, **kwargs: Any) -> list[Sample]:
        drawn.extend(samples := generate(*args, **kwargs))
        return samples

    trainer.job.sampler.generate = keep  # type: ignore[method-assign]
    trainer.evaluate()
    trainer.close()
    return [(tuple(s.request.prompt.input_ids), tuple(s.response_ids)) for s in drawn]
