"""`hpc-rl export`: what went in comes out, bit by bit, and transformers reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_rl import load_config
from hpc_rl.errors import UserError
from hpc_rl.export import export_checkpoint
from hpc_rl.rollout.vllm import preload
from hpc_rl.train import RLTrainer
from tests.cli.command import QUICKSTART, hpc_rl
from tests.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("api")
MODEL = QUICKSTART.with_suffix("") / "model"


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    preload("cpu")
    torch.set_num_threads(1)


def train(run: Path, model: Path, dtype: str, tp: int) -> None:
    """One step in which only the critic learns, and its checkpoint."""
    config = load_config(
        QUICKSTART,
        [
            f"run.dir={run}", f"model.path={model}", f"model.dtype={dtype}", f"parallel.tp={tp}", "steps=2",
            "algorithm.critic_warmup_steps=1", "data.prompts_per_step=4", "launch.device=cpu",
        ],
    )  # fmt: skip
    trainer = RLTrainer(config)
    trainer.train(max_steps=1)
    trainer.close()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over two tensor-parallel ranks whose actor stayed what it was, of a model stored in that dtype."""
    place = tmp_path_factory.mktemp(request.param)
    shutil.copytree(MODEL, place / "model")
    if request.param == "bfloat16":
        weights = load_file(MODEL / "model.safetensors")
        save_file({k: v.bfloat16() for k, v in weights.items()}, place / "model/model.safetensors", {"format": "pt"})
    run_ranks(2, train, place / "run", place / "model", request.param, 2)
    return place / "run"


def test_round_trip_is_bitwise(run: Path, tmp_path: Path) -> None:
    done = hpc_rl("export", run, "--hf", "out", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["checkpoint"].endswith("checkpoint_1_complete") and report["tokenizer"] is True
    assert report["dtype"] == run.parent.name[:-1]  # the fixture's parameter
    before, after = (load_file(path / "model.safetensors") for path in (run.parent / "model", tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name


def test_transformers_reads_the_actor(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_checkpoint(run, tmp_path / "out")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("12+34=", return_tensors="pt")["input_ids"]
    got, expected = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        for path in (tmp_path / "out", run.parent / "model")
    )
    assert torch.equal(got, expected)


def test_transformers_reads_the_critic(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    export_checkpoint(run, tmp_path / "out", role="critic", max_file_bytes=200_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert model.score.weight.abs().max() > 0, "the critic has learned"


def test_other_dtypes(run: Path, tmp_path: Path) -> None:
    """float32 of a bfloat16 run are its main weights; of an untouched actor they are the same values."""
    export_checkpoint(run, tmp_path / "out", dtype="float32")
    for name, value in load_file(tmp_path / "out/model.safetensors").items():
        expected = load_file(run.parent / "model/model.safetensors")[name].float()
        assert value.dtype == torch.float32 and torch.equal(value, expected), name
    critic = {}
    for dtype in ("float32", "bfloat16"):
        export_checkpoint(run, tmp_path / dtype, role="critic", dtype=dtype)
        critic[dtype] = load_file(tmp_path / dtype / "model.safetensors")["model.norm.weight"]
    assert torch.equal(critic["float32"].bfloat16(), critic["bfloat16"])
    assert not torch.equal(critic["float32"], critic["bfloat16"].float()), "main weights know more digits"


def test_a_checkpoint_away_from_its_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints/checkpoint_1_complete", tmp_path / "elsewhere/renamed")
    with pytest.raises(UserError, match=r"config.json: not there, .* with --model"):
        export_checkpoint(tmp_path / "elsewhere/renamed", tmp_path / "out")
    export_checkpoint(tmp_path / "elsewhere/renamed", tmp_path / "out", model=run.parent / "model")
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_refusals(run: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    shutil.copytree(run / "model", narrow)
    values = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(values | {"intermediate_size": 64}))
    (tmp_path / "there").mkdir()
    cases = [
        ((tmp_path / "nowhere",), {}, "no such directory"),
        ((tmp_path,), {}, "holds no checkpoint_STEP_complete"),
        ((run,), {"role": "reference"}, "--role reference: must be actor or critic"),
        ((run,), {"dtype": "int8"}, "--dtype int8: must be one of"),
        ((run,), {"model": narrow}, r"needs .*gate_proj.weight \[64, 128\], but .* has \[256, 128\]"),
    ]
    for args, options, message in cases:
        with pytest.raises(UserError, match=message):
            export_checkpoint(*args, tmp_path / "out", **options)
    with pytest.raises(UserError, match="there exists: choose another directory"):
        export_checkpoint(run, tmp_path / "there")
    assert not list(tmp_path.glob("out*"))
    done = hpc_rl("export", run, "--hf", "there", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "there exists" in done.stderr


def test_a_damaged_checkpoint_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shard = next((tmp_path / "run/checkpoints").glob("*/shards/rank_00000.h5"))
    data = bytearray(shard.read_bytes())
    embedding = load_file(run.parent / "model/model.safetensors")["model.embed_tokens.weight"]
    data[data.index(embedding[0].view(torch.uint8).numpy().tobytes())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match=r"rank_00000.h5: actor/param/model.embed_tokens.weight, .* digest does not match"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
