"""SFT, DPO, IPO and reward models: what ranks do, and the same in plain Hugging Face and torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.config_load import load_config
from hpc_rl.rollout import vllm
from hpc_rl.supervised import SupervisedTrainer
from tests.engine.reference import hf_outputs

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = {"sft": "sft.yaml", "dpo": "dpo.yaml", "ipo": "dpo.yaml", "reward_model": "reward_model.yaml"}
LR, BETA, SMOOTHING, CENTER = 1e-3, 0.3, 0.1, 0.05


def config_of(name: str, run_dir: Path, **overrides: Any) -> Config:
    """The shipped configuration, smaller, with every coefficient of the loss at work."""
    role = "critic" if name == "reward_model" else "actor"
    values = {
        "algorithm.name": name, "run.dir": run_dir, "data.prompts_per_step": 6,
        f"{role}.lr": LR, f"{role}.warmup_steps": 0, f"{role}.decay": "constant", "launch.device": "cpu",
        "eval.num_prompts": 16, **{k.replace("__", "."): v for k, v in overrides.items()},
    }  # fmt: skip
    values |= {
        "dpo": {"algorithm.beta": BETA, "algorithm.label_smoothing": SMOOTHING},
        "ipo": {"algorithm.beta": BETA},
        "reward_model": {"algorithm.reward_center": CENTER},
    }.get(name, {})
    return load_config(CONFIGS / NAMES[name], [f"{k}={v}" for k, v in values.items()])


def train(config: Config, last: int) -> dict[str, Any]:
    """Trains up to step ``last`` without a sampler: batches, metrics of each step, final weights, evaluation."""
    os.environ["HPC_RL_LOCAL"] = "1"
    vllm.VLLMEngine.__init__ = None  # type: ignore[method-assign,assignment]  # nothing may be generated
    trainer = SupervisedTrainer(config)
    batches: list[Batch] = []
    metrics: list[dict[str, float]] = []
    examples, step = trainer.job.examples, trainer.step
    make = examples.batch
    examples.batch = lambda lines: batches.append(make(lines)) or batches[-1]  # type: ignore[method-assign,func-returns-value]
    trainer.step = lambda number: metrics.append(step(number)) or metrics[-1]  # type: ignore[method-assign,func-returns-value]
    trainer.train(last - trainer.steps_done)
    weights = {name: tensor.clone() for name, tensor in trainer.job.model.shard_map()[1].items()}
    held_out = trainer.evaluate()
    trainer.close()
    return {"batches": batches, "metrics": metrics, "weights": weights, "held_out": held_out}


class Plain:
    """The same training with Hugging Face and torch AdamW, one sequence at a time."""

    def __init__(self, name: str) -> None:
        from transformers import LlamaForCausalLM

        directory = CONFIGS / "quickstart" / "model"
        self.name = name
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.reference = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1, bias=False)
        self.head.weight.data.zero_()
        is_scorer = name == "reward_model"
        self.params = [*(self.model.model if is_scorer else self.model).parameters(), *([self.head.weight] * is_scorer)]
        self.optimizer = torch.optim.AdamW(self.params, lr=LR, weight_decay=0.0)

    def loss(self, batch: Batch) -> Tensor:
        """Of a whole batch, over its own counts."""
        if self.name == "reward_model":
            scores = torch.stack([self._score(batch["input_ids"][lo : hi - 1]) for lo, hi in _bounds(batch)])
            chosen, rejected = scores[0::2], scores[1::2]
            return (-logsigmoid(chosen - rejected) + CENTER * (chosen + rejected) ** 2).mean()
        log_probs, _ = hf_outputs(self.model, batch)
        if self.name == "sft":
            return -log_probs.sum() / batch["response_mask"].sum()
        with torch.no_grad():
            ratios = log_probs - hf_outputs(self.reference, batch)[0]
        ratios = ratios + log_probs - log_probs.detach()
        lengths = [batch["response_mask"][lo:hi].sum() if self.name == "ipo" else 1 for lo, hi in _bounds(batch)]
        sums = torch.stack([ratios[lo:hi].sum() / n for (lo, hi), n in zip(_bounds(batch), lengths, strict=True)])
        margin = sums[0::2] - sums[1::2]
        if self.name == "ipo":
            return ((margin - 1 / (2 * BETA)) ** 2).mean()
        return -((1 - SMOOTHING) * logsigmoid(BETA * margin) + SMOOTHING * logsigmoid(-BETA * margin)).mean()

    def _score(self, ids: Tensor) -> Tensor:
        return self.head(self.model.model(ids[None]).last_hidden_state[0, -1])[0]

    def step(self, batch: Batch) -> tuple[float, float]:
        """Loss and gradient norm of one optimizer step."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, 1.0))
        self.optimizer.step()
        return loss.item(), norm


def _bounds(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))
