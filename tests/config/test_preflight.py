from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_rl.config import Config, RunConfig
from hpc_rl.config_load import load_config
from hpc_rl.preflight import check_outputs, check_torchvision, preflight
from tests.config.refusal import refused
from tests.data.models import hf_config, write_model, write_tokenizer

Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A configuration that passes, in a directory of its own, with overrides."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text('{"prompt_id": 1, "text": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.yaml").write_text("model: {path: model}\ndata: {prompts: p.jsonl}\nrun: {dir: out/run}\n")
    return lambda *overrides: load_config("run.yaml", overrides)


def snapshot(directory: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in directory.rglob("*"))


def test_a_good_run_passes_and_nothing_is_written(make: Make, tmp_path: Path) -> None:
    config = make("model.reference_path=model", "metrics.tensorboard=true", "metrics.prometheus_port=9100")
    before = snapshot(tmp_path)
    preflight(config, 2)
    assert snapshot(tmp_path) == before


def test_random_weights_need_no_model_directory(make: Make, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    preflight(make("model.path=null", f"model.config={json.dumps(hf_config())}", "model.tokenizer=tok"), 1)


def test_it_imports_nothing_heavy_and_takes_under_3_seconds(make: Make) -> None:
    make()
    code = """
        import sys, time
        start = time.perf_counter()
        from hpc_rl.config_load import load_config
        from hpc_rl.preflight import preflight
        preflight(load_config("run.yaml"), 1)
        heavy = {"torch", "transformers", "vllm", "pyarrow"} & set(sys.modules)
        print(time.perf_counter() - start, sorted(heavy))
    """
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env)
    seconds, heavy = shown.stdout.split(" ", 1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 3, shown.stderr


@pytest.mark.parametrize(
    ("overrides", "value", "rule", "fix"),
    [
        (["model.path=nowhere"], "model.path = nowhere", "must be an HF directory", "correct model.path"),
        (["model.path=p.jsonl"], "model.path = p.jsonl", "is a file", "correct model.path"),
        (["model.path=."], "model.path = .", "has no config.json", "point model.path at one"),
        (["model.tokenizer=nowhere"], "model.tokenizer = nowhere", "no such directory", "correct model.tokenizer"),
        (["model.critic_path=nowhere"], "model.critic_path = nowhere", "must be an HF directory", "correct"),
        (["parallel.tp=2"], "2*1*1 = 2", "must divide the number of ranks, but that is 1", "run 2 ranks"),
        (["data.prompts=nowhere.jsonl"], "nowhere.jsonl", "no such file", "correct data.prompts"),
        (["reward.function=nowhere:f"], "nowhere:f", "no module nowhere", "PYTHONPATH"),
        (
            ["reward.function=hpc_rl.reward.functions:reasoning_gym"],
            "p.jsonl line 1",
            "field task is missing",
            "add it",
        ),
        (["launch.device=cuda"], "launch.device = cuda", "CPU build", "launch.device=cpu"),
        (["resume=nowhere"], "resume = nowhere", "none, auto or a checkpoint directory", "resume=auto"),
        (["run.dir=p.jsonl/run"], "run.dir: p.jsonl/run", "p.jsonl is a file", "another run.dir"),
    ],
)
def test_refusals(make: Make, tmp_path: Path, overrides: list[str], value: str, rule: str, fix: str) -> None:
    config = make(*overrides)
    before = snapshot(tmp_path)
    with refused(value, rule, fix):
        preflight(config, 1)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "rule", "fix"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported", "llama, qwen2, qwen3"),
        (
            {"vocab_size": 200},
            "vocab_size is 200, but the tokenizer model has ids up to 257",
            "use the tokenizer that belongs",
        ),
        (
            {"vocab_rows": 512},
            "[512, 16], but config.json says [vocab_size, hidden_size] = [264, 16]",
            "fetch both again",
        ),
    ],
)
@pytest.mark.parametrize("key", ["path", "critic_path", "reference_path"])
def test_models_that_do_not_fit(
    make: Make, tmp_path: Path, key: str, changes: dict[str, Any], rule: str, fix: str
) -> None:
    write_model(tmp_path / "other", **changes)
    with refused(f"model.{key}", rule, fix):
        preflight(make(f"model.{key}=other", "model.tokenizer=model"), 1)


@pytest.mark.parametrize("key", ["critic_path", "reference_path"])
def test_second_model_of_another_vocabulary(make: Make, tmp_path: Path, key: str) -> None:
    write_model(tmp_path / "other")
    write_tokenizer(tmp_path / "other", extra=2)
    with refused(f"model.{key} = other", "2 tokens differ, '<extra0>' has id 258 there and None here", "same family"):
        preflight(make(f"model.{key}=other"), 1)
    write_tokenizer(tmp_path / "other", eos="<bos>")  # the same vocabulary, other files: fine
    preflight(make(f"model.{key}=other"), 1)


def test_a_tensor_too_many_or_too_few_is_named(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file({**tensors, name: torch.zeros(16)}, weights)
    with refused("model.path", f"holds {name} [16], which a", "correct config.json"):
        preflight(make(), 1)
    last = sorted(n for n in tensors if ".layers." in n)[-1]
    save_file({n: t for n, t in tensors.items() if n != last}, weights)
    with refused("model.path", f"has no {last}", "fetch the model again"):
        preflight(make(), 1)
    save_file({**tensors, last: torch.zeros(3)}, weights)
    with refused("model.path", f"{last} is [3], but config.json asks for", "fetch both again"):
        preflight(make(), 1)


def test_weights_that_are_not_whole(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with refused(f"model.safetensors has {len(whole) - 4} bytes", f"header says {len(whole)}", "fetch that file again"):
        preflight(make(), 1)
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    with refused("model.safetensors", "no safetensors file", "git lfs pull"):
        preflight(make(), 1)
    weights.unlink()
    with refused("has no model.safetensors", "must be safetensors", "fetch the model again (1 of 1 files missing)"):
        preflight(make(), 1)
    (tmp_path / "model" / "pytorch_model.bin").touch()
    with refused("has no model.safetensors", "must be safetensors", "convert it with transformers' save_pretrained"):
        preflight(make(), 1)


def test_sharded_weights(make: Make, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    preflight(make(), 1)
    names["b"] = "model-00002-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with refused("has no model-00002-of-00002.safetensors", "must be safetensors", "1 of 2 files missing"):
        preflight(make(), 1)
    (model / "model.safetensors.index.json").write_text("{")
    with refused("model.safetensors.index.json", "is no index", "fetch the model again"):
        preflight(make(), 1)


def test_tokenizers_that_do_not_work(make: Make, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", eos=None)
    with refused("model.path = model", "no eos_token", "set eos_token"):
        preflight(make(), 1)
    write_tokenizer(tmp_path / "model", eos="<stop>")
    with refused("'<stop>'", "not in its vocabulary", "tokenizer_config.json"):
        preflight(make(), 1)
    (tmp_path / "model" / "tokenizer_config.json").write_text("[")
    with refused("tokenizer_config.json", "no JSON object", "fetch the model again"):
        preflight(make(), 1)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with refused("tokenizer.json", "is not a tokenizer", "fetch the model again"):
        preflight(make(), 1)


def test_hidden_gpus(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with refused("launch.device = cuda", "CUDA_VISIBLE_DEVICES = '' hides every GPU", "launch.device=cpu"):
        preflight(make("launch.device=cuda"), 1)


def test_prompt_file_is_checked_line_by_line(make: Make, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt_id": 1, "text": "a", "answer": "2"}\n{"prompt_id": 2, "text": "b"}\n')
    with refused("p.jsonl line 2", "the field answer is missing", "add it"):
        preflight(make(), 1)
    preflight(make("reward.function=hpc_rl.reward.functions:length_penalty"), 1)


def write_dist(site: Path, name: str, version: str, requires: str = "") -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *([f"Requires-Dist: {requires}"] if requires else [])]) + "\n")


@pytest.mark.parametrize(
    ("torch", "torchvision", "pin", "cuda_library", "fault"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", "torch (==2.13.0)", False, None),
        ("2.13.0+cpu", None, "", False, None),
        ("2.11.0", "0.26.0", "torch==2.11.0", True, None),
        ("2.13.0+cpu", "0.26.0", "torch==2.11.0", False, "needs torch==2.11.0, but torch is 2.13.0+cpu"),
        ("2.13.0+cpu", "0.28.0", "torch==2.13.0", True, "needs a CUDA build of torch, but torch is 2.13.0+cpu"),
    ],
)
def test_torchvision_of_another_torch(
    tmp_path: Path, torch: str, torchvision: str | None, pin: str, cuda_library: bool, fault: str | None
) -> None:
    """In a process whose only packages are these, found as any installed ones are."""
    write_dist(tmp_path, "torch", torch)
    if torchvision is not None:
        write_dist(tmp_path, "torchvision", torchvision, pin)
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "_C.so").write_bytes(b"\x7fELF\0libtorch_cuda.so\0" if cuda_library else b"\x7fELF")
    if not torch.endswith("+cpu"):
        (tmp_path / "torch" / "lib").mkdir(parents=True)
        (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    sys.path.insert(0, str(tmp_path))
    try:
        if fault is None:
            check_torchvision()
        else:
            with refused(
                fault, "torchvision::nms does not exist", "pip uninstall -y torchvision torchaudio torchcodec"
            ):
                check_torchvision()
    finally:
        sys.path.remove(str(tmp_path))


def test_wrong_torchvision_is_found_before_a_run(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make()
    write_dist(tmp_path / "site", "torchvision", "0.1.0", "torch==1.2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with refused("torchvision 0.1.0 needs torch==1.2.0", "torchvision::nms does not exist", "pip uninstall -y"):
        preflight(config, 1)


@pytest.mark.parametrize(
    ("override", "package"),
    [("metrics.tensorboard=true", "tensorboard"), ("metrics.prometheus_port=9100", "prometheus_client")],
)
def test_package_of_a_sink_is_missing(make: Make, monkeypatch: pytest.MonkeyPatch, override: str, package: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    preflight(make(), 1)
    with refused(override.split("=")[0], f"needs {package}, which is not installed", f"pip install {package}"):
        preflight(make(override), 1)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that other users can reach; tmp_path is for its owner alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_outputs_that_may_not_be_written(open_dir: Path) -> None:
    """As a user who may not: in a child process, since root may write anywhere."""
    locked = open_dir / "locked"
    (locked / "run" / "checkpoints").mkdir(parents=True)
    (locked / "run" / "metrics.jsonl").touch()
    cases = [
        (locked, 0o555, "new", f"cannot be made, because {locked} is not writable"),
        (locked / "run", 0o555, "run", "is not writable by this user"),
        (locked / "run" / "checkpoints", 0o555, "run", "checkpoints is not writable by this user"),
        (locked / "run" / "metrics.jsonl", 0o444, "run", "metrics.jsonl: may not be written"),
    ]
    for path, mode, run_dir, rule in cases:
        config = Config(run=RunConfig(str(locked / run_dir)))
        usual = path.stat().st_mode
        for parent in (locked, locked / "run", locked / "run" / "checkpoints"):
            parent.chmod(0o777)
        (locked / "run" / "metrics.jsonl").chmod(0o666)
        path.chmod(mode)
        message = as_nobody(lambda config=config: check_outputs(config))
        path.chmod(usual)
        assert rule in message, message
        assert message.endswith("another run.dir"), message
    for parent in (locked, locked / "run", locked / "run" / "checkpoints"):
        parent.chmod(0o777)
    assert as_nobody(lambda: check_outputs(config)) == ""


def as_nobody(action: Callable[[], None]) -> str:
    """What ``action`` raises (nothing: "") in a forked child that is no longer root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            action()
            os._exit(0)
        except BaseException as error:
            os.write(writer, str(error).encode())
            os._exit(1)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()
