"""Configurations and jobs to plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_rl.config import AlgorithmConfig, Config, DataConfig, ModelConfig, ParallelConfig, RolloutConfig
from hpc_rl.plan.hardware import CPU, GPUS
from hpc_rl.plan.job import PlannedJob, plan_job

# 52 M parameters.
SMALL = {
    "model_type": "llama", "vocab_size": 20000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_1B = {
    "model_type": "qwen2", "vocab_size": 32768, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
PPO_70B = """\
model:
  tokenizer: tokenizer
  config: {model_type: llama, vocab_size: 128256, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80,
    num_attention_heads: 64, num_key_value_heads: 8, max_position_embeddings: 8192, tie_word_embeddings: false}
launch: {nproc: 8, nodes: 16}
parallel: {tp: 8, pp: 4}
data: {prompts: prompts.jsonl, prompts_per_step: 512, max_prompt_tokens: 1024}
rollout: {max_response_tokens: 1024, gpu_memory_utilization: 0.35}
algorithm: {mini_batches: 4, micro_batch_tokens: 4096}
checkpoint: {every: 10}
"""


def config_of(
    hf: dict[str, Any], *, dtype: str = "float32", tokens: int = 512, prompts: int = 8, length: int = 64,
    algorithm: str = "ppo", rollout: dict[str, Any] | None = None, **parallel: Any,
) -> Config:  # fmt: skip
    """``prompts`` sequences of ``length`` tokens, a quarter of them prompt, micro-batches of ``tokens``."""
    return Config(
        model=ModelConfig(dtype=dtype, config=hf, tokenizer="tokenizer"),  # type: ignore[arg-type]
        data=DataConfig(prompts="prompts.jsonl", prompts_per_step=prompts, max_prompt_tokens=length // 4),
        rollout=RolloutConfig(max_response_tokens=length - length // 4, **(rollout or {})),
        algorithm=AlgorithmConfig(name=algorithm, micro_batch_tokens=tokens),
        parallel=ParallelConfig(**parallel),
    )


def job_of(config: Config, ranks: int = 1, *, nodes: int = 1, gpu: str = "cpu") -> PlannedJob:
    """The job of ``config`` on ``ranks`` ranks over ``nodes`` nodes."""
    return plan_job(config, CPU if gpu == "cpu" else GPUS[gpu], nodes, ranks // nodes)


def write_70b(directory: Path) -> Path:
    """The 70B configuration as a file."""
    path = directory / "ppo_70b.yaml"
    path.write_text(PPO_70B)
    return path
