"""HF directories: written by transformers, read slice by slice, exported, and read again, bit for bit."""

import ctypes
import json
import mmap
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.hf import check_names, load_into, open_hf
from hpc_rl.tensors.hf_export import export_hf, files_of
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import view
from tests.tensors.models import CONFIGS, empty_locals, fill, spec_of

MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "llama_tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}


def save_model(kind: str, path: Path, dtype: torch.dtype = torch.float32, **kw) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config, model = MODELS[kind]
    values = {k: v for k, v in CONFIGS[kind].items() if k != "model_type"}
    out = model(config(**values)).to(dtype)
    with torch.no_grad():
        for parameter in out.parameters():
            parameter.normal_()
    out.save_pretrained(path, **kw)
    return out


@pytest.mark.parametrize("kind", MODELS)
def test_canonical_tensors_are_those_transformers_saves(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path)
    source = open_hf(tmp_path)
    spec = source.spec()
    check_names(source, spec)
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    saved = load_file(tmp_path / "model.safetensors")
    for name, shape in spec.tensors().items():
        assert torch.equal(source.read(name, (0,) * len(shape), shape), saved[name]), name


LAYOUTS = [Layout(1), Layout(4, tp=4), Layout(4, tp=2, pp=2), Layout(4, pp=4), Layout(4, tp=2, pp=2, vpp=2)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trip_through_any_megatron_layout_is_bitwise(kind: str, layout: Layout, tmp_path: Path) -> None:
    save_model(kind, tmp_path / "in", max_shard_size="20KB")
    source = open_hf(tmp_path / "in")
    spec = source.spec()
    whole = {name: torch.full(shape, float("nan")) for name, shape in spec.tensors().items()}
    for rank in range(layout.world_size):
        shard_map = megatron_shard_map(spec, layout, rank)
        tensors = empty_locals(shard_map)
        report = load_into(shard_map, tensors, source)
        rows = [p.numel // p.shape[-1] * spec.tensors()[p.name][-1] if len(p.shape) > 1 else p.numel for p in shard_map.pieces]
        assert report.bytes_read == 4 * sum(rows) and not report.casts
        assert not any(t.isnan().any() for t in tensors.values()), "padding must be zero"
        for p in shard_map.pieces:
            box = tuple(slice(s, s + n) for s, n in zip(p.start, p.shape, strict=True))
            whole[p.name][box] = view(p, tensors[p.local])
    out = export_hf(tmp_path / "out", spec, whole.__getitem__, source.config, "float32", max_file_bytes=50_000)
    again = open_hf(out)
    assert len({place.file for place in again.stored.values()}) > 1
    for name, shape in spec.tensors().items():
        everything = ((0,) * len(shape), shape)
        assert torch.equal(again.read(name, *everything), source.read(name, *everything)), name
    assert ModelSpec.from_hf_config(json.loads((out / "config.json").read_text())) == spec
    assert not (tmp_path / "out.partial").exists()


def test_transformers_loads_what_was_exported(tmp_path: Path) -> None:
    model = save_model("qwen3_moe", tmp_path / "in")
    source = open_hf(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    spec = source.spec()
    saved = load_file(tmp_path / "in" / "model.safetensors")
    export_hf(tmp_path / "out", spec, saved.__getitem__, source.config, "float32", tokenizer=tmp_path / "in")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(12).view(1, -1)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_experts_saved_as_one_tensor_are_read_one_by_one(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    separate = open_hf(tmp_path)
    spec = separate.spec()
    values = load_file(tmp_path / "model.safetensors")
    fused = {name: t for name, t in values.items() if ".experts." not in name}
    for layer in spec.moe_layers:
        base = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([values[f"{base}{e}.{x}_proj.weight"] for e in range(4)]) for x in ("gate", "up", "down")
        )
        fused |= {f"{base}gate_up_proj": torch.cat([gate, up], 1).contiguous(), f"{base}down_proj": down}
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_text((tmp_path / "config.json").read_text())
    source = open_hf(tmp_path / "fused")
    check_names(source, spec)
    shard_map = megatron_shard_map(spec, Layout(4, tp=2, ep=2), 3)
    a, b = empty_locals(shard_map), empty_locals(shard_map)
    load_into(shard_map, a, source)
    load_into(shard_map, b, separate)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_casts_are_stated_and_a_new_value_head_is_reported(tmp_path: Path) -> None:
    save_model("llama", tmp_path, torch.bfloat16)
    source = open_hf(tmp_path)
    spec = source.spec("critic")
    assert spec.dtype == "bfloat16"
    shard_map = megatron_shard_map(spec, Layout(1), 0, dtype="float32")
    tensors = empty_locals(shard_map)
    report = load_into(shard_map, tensors, source, optional=("value_head.weight",))
    assert report.missing == ["value_head.weight"] and set(report.casts) == {"bfloat16 -> float32"}
    saved = load_file(tmp_path / "model.safetensors")
    expected = empty_locals(shard_map)
    saved["value_head.weight"] = torch.full((1, 32), float("nan"))
    fill(shard_map, expected, {k: v.float() for k, v in saved.items()})
    for local in tensors:
        if local != "value_head.weight":
            assert torch.equal(tensors[local], expected[local].nan_to_num(0.0)), local
    with pytest.raises(UserError, match=r"value_head.weight, of shape \[1, 32\], is missing"):
        load_into(shard_map, tensors, source)


def edit(path: Path, change) -> None:
    values = load_file(path / "model.safetensors")
    change(values)
    save_file({k: v.contiguous() for k, v in values.items()}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v.pop("model.layers.2.mlp.up_proj.weight"),
            r"layers.2.mlp.up_proj.weight, of shape \[48, 32\], is missing",
        ),
        (
            lambda v: v.update({"model.norm.bias": torch.zeros(32)}),
            r"holds model.norm.bias, of shape \[32\], unknown to llama",
        ),
        (
            lambda v: v.update({"lm_head.weight": torch.zeros(251, 32)}),
            r"lm_head.weight is \[251, 32\].*needs \[250, 32\]",
        ),
    ],
)
def test_a_wrong_directory_is_named(change, message: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit(tmp_path, change)
    with pytest.raises(UserError, match=message):
        check_names(open_hf(tmp_path), spec_of("llama"))


def test_nothing_is_written_if_a_shape_is_wrong(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    edit(tmp_path, lambda v: v.update({"lm_head.weight": torch.zeros(250, 33)}))
    shard_map = megatron_shard_map(spec_of("llama"), Layout(1), 0)
    tensors = empty_locals(shard_map)
    with pytest.raises(UserError, match=r"lm_head.weight is \[250, 33\]"):
        load_into(shard_map, tensors, open_hf(tmp_path))
    assert all(t.isnan().all() for t in tensors.values())


def test_broken_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not valid JSON"):
        open_hf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        open_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        open_hf(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names model-00001-of-00002.safetensors, which is missing"):
        open_hf(tmp_path)
    with pytest.raises(UserError, match="exists: choose another"):
        export_hf(tmp_path, spec_of("llama"), {}.__getitem__, {}, "float32")


def test_file_sizes_keep_to_the_limit() -> None:
    spec = spec_of("llama")
    files = files_of(spec, "bfloat16", 40_000)
    sizes = [sum(2 * torch.Size(spec.tensors()[n]).numel() for n in names) for names in files.values()]
    assert max(sizes) <= 40_000 and len(files) > 2
    assert [n for names in files.values() for n in names] == list(spec.tensors())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported: use one of llama"),
        ({"attention_bias": True}, "attention_bias = true is not supported for model_type llama"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' of the model is not supported"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_type 'llama3' needs the number low_freq_factor"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_config_that_is_not_supported_is_named(changes: dict, message: str) -> None:
    config = {k: v for k, v in {**CONFIGS["llama"], **changes}.items() if v is not None}
    with pytest.raises(UserError, match=message):
        ModelSpec.from_hf_config(config)


def test_rope_is_kept_in_old_and_new_spelling() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}
    base = {k: v for k, v in CONFIGS["llama"].items() if k != "rope_theta"}
    a, b = (ModelSpec.from_hf_config({**base, **c}) for c in (old, new))
    assert a.rope == b.rope == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}


@pytest.mark.parametrize("layout", [Layout(4, tp=4), Layout(2, pp=2)], ids=["tp4", "pp2"])
def test_only_the_rows_of_a_rank_come_from_the_disk(layout: Layout, tmp_path: Path) -> None:
    """The pages of the file that a load brings into memory, by mincore(2)."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 1000}
    spec = spec_of("llama", **sizes)
    file = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in spec.tensors().items()}, file)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], **sizes}))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_share(file) > 0.01:
        pytest.skip("this file system keeps its files in memory")
    shard_map = megatron_shard_map(spec, layout, 0)
    report = load_into(shard_map, empty_locals(shard_map), open_hf(tmp_path))
    share = report.bytes_read / file.stat().st_size
    assert 0.4 < share < 0.65
    assert share - 0.02 < resident_share(file) < share + 0.2  # read-ahead


def resident_share(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = path.stat().st_size
    with path.open("rb") as file:
        address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(state & 1 for state in states) / len(states)
