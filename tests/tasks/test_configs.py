"""The checked-in configurations: each is read, and those of clusters fit on the GPUs that they are written for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_rl.algo.checks import validate
from hpc_rl.config_load import load_config
from hpc_rl.plan.report import plan

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))

# The shapes of the models that the cluster configurations name.
COMMON = {"tie_word_embeddings": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "eos_token_id": 2}
LLAMA_8B = {
    **COMMON, "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_70B = {
    **COMMON, "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
QWEN_32B = {
    **COMMON, "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
}  # fmt: skip
CLUSTER = {
    "ppo_8b": (LLAMA_8B, 8, 8.0), "grpo_32b": (QWEN_32B, 64, 32.8), "dapo_32b": (QWEN_32B, 64, 32.8),
    "ppo_70b": (LLAMA_70B, 128, 70.6),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_is_read_and_short(name: str) -> None:
    validate(load_config(CONFIGS / f"{name}.yaml", []))
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert 10 <= len(text.splitlines()) <= 60


@pytest.mark.parametrize("name", CLUSTER)
def test_cluster_configurations_fit(name: str, tmp_path: Path) -> None:
    shape, ranks, billions = CLUSTER[name]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    _, report = plan(CONFIGS / f"{name}.yaml", [f"model.path={tmp_path}"], gpu="h100")
    assert len(report["layout"]["ranks"]) == ranks
    assert report["fits"], report["reason"]
    assert not report["warnings"]
    assert report["model_params"]["actor"] / 1e9 == pytest.approx(billions, abs=0.1)
