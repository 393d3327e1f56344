"""Every wrong input that a user can make, through the real command: exit code 2, one line, nothing written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.storage.lock import RunLock
from tests.cli.command import hpc_rl
from tests.config.test_preflight import snapshot, write_dist
from tests.data.models import write_model, write_tokenizer

RUN = "model: {path: model, dtype: float32}\ndata: {prompts: p.jsonl}\nrun: {dir: out/run}\nlaunch: {nproc: 2}\n"
PROMPTS = '{"prompt_id": 1, "text": "1+1=", "answer": "2"}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model, prompts and a configuration that would start."""
    write_model(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text(PROMPTS)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def refuse(place: Path, overrides: list[str], parts: tuple[str, ...], **how: object) -> None:
    """`hpc-rl train` with these overrides says ``parts`` in this order, in one line, and writes nothing."""
    before = snapshot(place)
    done = hpc_rl("train", "run.yaml", *overrides, cwd=place, **how)  # type: ignore[arg-type]
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("hpc-rl: ") and done.stderr.count("\n") == 1, done.stderr
    at = 0
    for part in parts:
        at = done.stderr.find(part, at)
        assert at >= 0, f"{part!r} is not in {done.stderr!r}, or in another order"
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.gama=0.9"], ("algorithm.gama = 0.9", "there is no key", "algorithm.gamma")),
        (["steps=many"], ("steps = 'many'", "wrong type", "must be", "the default is 100")),
        (["algorithm.mini_batches=3"], ("mini_batches = 3", "must divide the sequences", "set algorithm.mini_batches")),
        (["algorithm.name=pppo"], ("algorithm.name = pppo", "is not known", "did you mean ppo")),
        (["algorithm.name=grpo"], ("rollout.samples_per_prompt = 1", "compares the samples of a prompt", "set it to 2")),
        (["parallel.tp=3", "launch.nproc=3"], ("tp = 3", "num_attention_heads = 4", "set parallel.tp")),
        (["parallel.tp=4"], ("4*1*1 = 4", "must divide the number of ranks, but that is 2", "run 4 ranks")),
        (["model.path=nowhere"], ("model.path = nowhere", "must be an HF directory", "correct model.path")),
        (["data.prompts=nowhere.jsonl"], ("nowhere.jsonl", "no such file", "correct data.prompts")),
        (["reward.function=nowhere:f"], ("nowhere:f", "no module nowhere", "PYTHONPATH")),
        (["reward.function=json:nothing"], ("json:nothing", "json has no nothing", "it has")),
        (["run.dir=p.jsonl/run"], ("p.jsonl/run", "p.jsonl is a file", "another run.dir")),
        (["resume=nowhere"], ("resume = nowhere", "must be none, auto or a checkpoint", "resume=auto")),
        (["resume=model"], ("resume = model", "has no manifest.json", "checkpoint_STEP_complete")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_configuration(place: Path, overrides: list[str], parts: tuple[str, ...]) -> None:
    refuse(place, overrides, parts)


def prompts(text: str) -> Callable[[Path], object]:
    return lambda place: (place / "p.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (prompts(PROMPTS + '{"prompt_id": 2,\n'), ("p.jsonl line 2", "JSON")),
        (prompts(PROMPTS + '{"prompt_id": 2, "text": "3"}\n'), ("p.jsonl line 2", "field answer is missing", "add it")),
        (prompts(PROMPTS + '{"text": "3", "answer": "4"}\n'), ("p.jsonl line 2", "prompt_id")),
        (prompts(""), ("p.jsonl", "holds 0 prompts", "add prompts")),
        (lambda p: write_tokenizer(p / "model", eos=None), ("model.path = model", "no eos_token", "set eos_token")),
        (lambda p: write_model(p / "model", vocab_rows=500), ("[500, 16]", "vocab_size", "fetch both again")),
        (lambda p: write_model(p / "model", vocab_size=200), ("vocab_size is 200", "tokenizer", "belongs to")),
        (lambda p: (p / "model" / "config.json").write_text("{"), ("config.json", "JSON", "fetch the model again")),
        (lambda p: (p / "run.yaml").write_text("steps: [1\n"), ("run.yaml", "YAML")),
        (lambda p: (p / "run.yaml").unlink(), ("run.yaml", "no such file")),
    ],
    ids=["not-json", "no-answer", "no-id", "empty", "no-eos", "vocab-rows", "vocab-size", "config", "yaml", "no-yaml"],
)  # fmt: skip
def test_files(place: Path, spoil: Callable[[Path], object], parts: tuple[str, ...]) -> None:
    spoil(place)
    refuse(place, [], parts)


def test_wrong_torchvision(place: Path) -> None:
    write_dist(place / "site", "torchvision", "0.1.0", "torch==1.2.0")
    refuse(place, [], ("torchvision 0.1.0 needs torch==1.2.0", "pip uninstall -y"), python_path=place / "site")


def test_a_gpu_is_asked_for_and_none_is_there(place: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    refuse(place, ["launch.device=cuda"], ("launch.device = cuda", "hides every GPU", "launch.device=cpu"), env=env)


def test_an_earlier_run_is_not_moved_by_a_refused_one(place: Path) -> None:
    (place / "out/run").mkdir(parents=True)
    (place / "out/run/metrics.jsonl").write_text("{}\n")
    refuse(place, ["algorithm.mini_batches=3"], ("mini_batches = 3",))


def test_a_run_directory_in_use(place: Path) -> None:
    """Its files stay where they are, and the one who holds it is named."""
    metrics = place / "out/run/metrics.jsonl"
    with RunLock(place / "out/run"):
        metrics.write_text("{}\n")
        done = hpc_rl("train", "run.yaml", cwd=place)
    assert done.returncode == 2 and done.stdout == ""
    assert f"hpc-rl: out/run: in use by process {os.getpid()} on " in done.stderr
    assert "end that job, or set another run.dir\n" in done.stderr and done.stderr.count("\n") == 1
    assert metrics.read_text() == "{}\n" and not list(place.glob("out/run/previous-*"))


def test_the_place_would_start(place: Path) -> None:
    """Without its faults this input gets past all checks: that vLLM has no heads of 4 on a CPU is what a rank finds."""
    done = hpc_rl("train", "run.yaml", "launch.nproc=1", "data.prompts_per_step=1", cwd=place)
    assert (place / "out/run/config.yaml").is_file(), done.stderr
    assert done.returncode == 2 and "head size 4 is not one that vLLM has on CPU" in done.stderr
