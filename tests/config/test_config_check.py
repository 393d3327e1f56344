from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config_check import cross_check, read_hf_config
from hpc_rl.config_load import load_config
from tests.config.refusal import refused
from tests.data.models import hf_config

BASE = {"data": {"prompts": "p.jsonl", "prompts_per_step": 6}, "model": {"tokenizer": "t"}}
BASE["model"]["config"] = hf_config(num_hidden_layers=6, num_attention_heads=8)


def config_of(tmp_path: Path, *overrides: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(BASE))
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, []),
        (8, ["parallel.tp=2", "parallel.pp=2"]),
        (3, ["parallel.pp=3", "rollout.tp=1"]),
        (4, ["parallel.tp=4"]),  # a multiple of the 2 key-value heads
        (2, ["rollout.tp=2", "algorithm.mini_batches=3"]),
        (1, ["data.max_prompt_tokens=4000", "rollout.max_response_tokens=96"]),
        (1, ["actor.decay=linear", "actor.min_lr=1e-6", "actor.warmup_steps=3", "actor.decay_steps=4"]),
        (1, ["rollout.kv_cache_bytes=147456"]),  # 1536 tokens of 96 bytes
        (1, ["rollout.kv_cache_bytes=1", "algorithm.name=sft"]),  # training starts no vLLM
        (1, ["critic.min_lr=1"]),  # constant: no decay to it
        (1, ["reward.timeout_s=9", "fault.phase_timeout_s.reward=10"]),
        (1, ["reward.timeout_s=5000", "fault.phase_timeout_s.reward=0"]),
    ],
)
def test_what_fits(tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    cross_check(config_of(tmp_path, *overrides), world_size)


@pytest.mark.parametrize(
    ("world_size", "overrides", "value", "rule", "fix"),
    [
        (
            6,
            ["parallel.tp=2", "parallel.pp=2"],
            "2*2*1 = 4",
            "must divide the number of ranks, but that is 6",
            "run 4 or 8 ranks",
        ),
        (2, ["parallel.pp=4"], "1*4*1 = 4", "but that is 2", "run 4 ranks"),
        (1, ["reward.timeout_s=1200"], "reward.timeout_s = 1200", "is not below 1200", "phase_timeout_s.reward=2400"),
        (
            1,
            ["reward.timeout_s=9", "fault.phase_timeout_s.reward=8"],
            "timeout_s = 9",
            "is not below 8",
            "reward=18",
        ),
        (4, ["rollout.tp=3"], "rollout.tp = 3", "must divide the number of ranks, but that is 4", "1, 2 or 4"),
        (3, ["parallel.tp=3"], "parallel.tp = 3", "must divide the model's num_attention_heads = 8", "1, 2, 4 or 8"),
        (2, ["parallel.engine=fsdp2", "parallel.tp=2"], "parallel.engine = fsdp2", "over all ranks", "set both to 1"),
        (2, ["parallel.engine=zero1", "parallel.pp=2"], "parallel.engine = zero1", "tp*pp = 1*2", "engine=megatron"),
        (3, ["rollout.tp=3"], "rollout.tp = 3", "num_attention_heads = 8", "set rollout.tp to 1, 2, 4 or 8"),
        (
            4,
            ["parallel.tp=4", "model.config.intermediate_size=34"],
            "tp = 4",
            "intermediate_size = 34",
            "1, 2, 17 or 34",
        ),
        (4, ["parallel.tp=4", "model.config.num_key_value_heads=3"], "tp = 4", "num_key_value_heads = 3", "1 or 3"),
        (4, ["parallel.pp=4"], "parallel.pp = 4", "must divide the model's num_hidden_layers = 6", "1, 2, 3 or 6"),
        (2, ["parallel.cp=2"], "parallel.cp = 2", "is not supported yet", "set parallel.cp=1"),
        (2, ["parallel.ep=2"], "parallel.ep = 2", "is not supported yet", "set parallel.ep=1"),
        (1, ["algorithm.mini_batches=4"], "mini_batches = 4", "must divide the sequences of a step", "6 * 1 = 6"),
        (1, ["algorithm.mini_batches=7"], "mini_batches = 7", "must divide the sequences of a step", "1, 2, 3 or 6"),
        (1, ["model.path=x"], "model.path = x", "exactly one may be", "model.path=null"),
        (1, ["model.config=null"], "both null", "set", "model.path"),
        (1, ["model.tokenizer=null"], "model.tokenizer is null", "has none of its own", "set model.tokenizer"),
        (1, ["data.prompts=null"], "data.prompts is null", "needs prompts", "JSONL or Parquet"),
        (1, ["data.prompts=[]"], "data.prompts", "needs prompts", "JSONL or Parquet"),
        (1, ["data.max_prompt_tokens=4096"], "4096 + 512 = 4608", "max_position_embeddings is 4096", "lower"),
        (
            1,
            ["rollout.kv_cache_bytes=100000", "model.dtype=float32"],  # 6 layers, 2 heads of 2 numbers
            "rollout.kv_cache_bytes = 100000 holds 520 tokens",
            "data.max_prompt_tokens + rollout.max_response_tokens = 1536",
            "set it to 319488 or more",
        ),
        (1, ["actor.min_lr=1", "actor.decay=cosine"], "actor.min_lr = 1.0", "above actor.lr = 1e-06", "at most 1e-06"),
        (
            1,
            ["critic.warmup_steps=5", "critic.decay_steps=5"],
            "decay_steps = 5",
            "above critic.warmup_steps = 5",
            "raise",
        ),
        (1, ["checkpoint.keep_best=eval/pass_at_1"], "eval/pass_at_1", "eval.every = 0 makes none", "set eval.every"),
        (1, ["model.config.num_hidden_layers=null"], "num_hidden_layers = None", "positive integer", "set it in"),
        (1, ["model.config.vocab_size=x"], "vocab_size = 'x'", "positive integer", "set it in"),
    ],
)
def test_what_does_not(tmp_path: Path, world_size: int, overrides: list[str], value: str, rule: str, fix: str) -> None:
    with refused(value, rule, fix):
        cross_check(config_of(tmp_path, *overrides), world_size)


def test_sizes_are_read_from_the_model_directory(tmp_path: Path) -> None:
    config = config_of(tmp_path, "model.config=null", f"model.path={tmp_path}", "parallel.tp=3")
    with refused(str(tmp_path), "has no config.json", "point model.path at one"):
        cross_check(config, 3)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    assert read_hf_config(config) == hf_config()
    with refused("parallel.tp = 3", "num_attention_heads = 4", "1, 2 or 4"):
        cross_check(config, 3)
    (tmp_path / "config.json").write_text("{")
    with refused(str(tmp_path / "config.json"), "cannot be read as JSON", "fetch the model again"):
        cross_check(config, 3)
    (tmp_path / "config.json").write_text("[]")
    with refused(str(tmp_path / "config.json"), "must be a JSON object", "fetch the model again"):
        cross_check(config, 3)
