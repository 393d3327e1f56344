"""Parameters to and from torch DCP and Hugging Face directories, bitwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from hpc_rl.convert import convert, read_dcp, read_hf
from hpc_rl.errors import UserError
from hpc_rl.storage.inspect import diff_paths
from tests.tensors.models import CONFIGS, random_tensors, spec_of


@pytest.fixture(params=["llama_tied", "qwen3_moe"])
def hf(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / request.param
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    save_file(random_tensors(spec_of(request.param), torch.bfloat16), path / "model.safetensors")
    return path


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_hf_to_a_checkpoint_and_back(hf: Path, tmp_path: Path) -> None:
    report = convert(hf, tmp_path / "run", "hpc_rl")
    assert report["num_params"] == spec_of(hf.name).num_params
    convert(tmp_path / "run", tmp_path / "back", "hf")
    assert same(read_hf(tmp_path / "back", spec_of(hf.name)), read_hf(hf, spec_of(hf.name)))


def test_a_checkpoint_to_dcp_and_back(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "run", "hpc_rl")
    convert(tmp_path / "run", tmp_path / "dcp", "dcp")
    assert same(read_dcp(tmp_path / "dcp", spec_of(hf.name)), read_hf(hf, spec_of(hf.name)))
    convert(tmp_path / "dcp", tmp_path / "again", "hpc_rl", model=hf)
    assert diff_paths(tmp_path / "run", tmp_path / "again")["same"]


def test_dcp_names_may_have_a_prefix(hf: Path, tmp_path: Path) -> None:
    tensors = read_hf(hf, spec_of(hf.name))
    state = {"app": {"model": {"module." + n: t for n, t in tensors.items()}, "step": 5}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(read_dcp(tmp_path / "dcp", spec_of(hf.name)), tensors)


def test_what_does_not_fit_is_refused_before_anything_is_written(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "run", "hpc_rl")
    convert(tmp_path / "run", tmp_path / "dcp", "dcp")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**CONFIGS[hf.name], "vocab_size": 251}))
    cases = [
        ((hf, tmp_path / "x", "dcp"), {}, "it converts to hpc_rl, not to dcp"),
        ((tmp_path / "run", tmp_path / "x", "hpc_rl"), {}, "it converts to hf or dcp"),
        ((tmp_path / "run", hf, "hf"), {}, "exists: choose another directory"),
        ((tmp_path / "dcp", tmp_path / "x", "hpc_rl"), {}, "DCP has no config.json"),
        ((tmp_path / "dcp", tmp_path / "x", "hpc_rl"), {"model": other}, "is .250, 32., but the model needs .251, 32."),
        ((other, tmp_path / "x", "hpc_rl"), {}, "neither safetensors"),
        ((tmp_path / "run", tmp_path / "x", "dcp"), {"role": "critic"}, "holds no critic"),
    ]
    for args, kwargs, message in cases:
        with pytest.raises(UserError, match=message):
            convert(*args, **kwargs)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
