"""pass@k and intervals against their definitions; a checkpoint scored at any layout as the run itself scores it."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_rl.config import Config
from hpc_rl.errors import UserError
from hpc_rl.evaluate import evaluate_model, pass_at_k, summarize
from hpc_rl.preflight import preflight, preflight_eval
from hpc_rl.run import run_eval
from hpc_rl.train import RLTrainer
from tests.ranks import RankFailed, run_ranks
from tests.train.kl import ACTOR, held_out
from tests.train.runs import QUICKSTART, quickstart
from tests.train.supervised import config_of as supervised_config
from tests.train.supervised import train as train_supervised

pytestmark = pytest.mark.xdist_group("train")


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k(num_samples: int) -> None:
    for passed in range(num_samples + 1):
        outcomes = [True] * passed + [False] * (num_samples - passed)
        for k in range(1, num_samples + 1):
            choices = [any(choice) for choice in itertools.combinations(outcomes, k)]
            got = float(pass_at_k(num_samples, torch.tensor([passed]), k))
            assert got == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_of_many_samples_is_finite() -> None:
    assert float(pass_at_k(10_000, torch.tensor([3]), 1000)) == pytest.approx(
        1 - math.comb(9_997, 1000) / math.comb(10_000, 1000)
    )


def test_summary_by_hand() -> None:
    scores = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    got = summarize(scores, pass_score=1.0)
    assert got["pass_at_1"] == pytest.approx((1 / 3 + 1) / 4)
    assert got["pass_at_2"] == pytest.approx((2 / 3 + 1) / 4)
    assert got["pass_at_3"] == pytest.approx(2 / 4)
    assert set(got) == {"pass_at_1", "pass_at_2", "pass_at_3", "reward_mean", "reward_low", "reward_high"}
    means = [1 / 3, 1.0, 1 / 6, 0.0]
    mean = sum(means) / 4
    half = 1.959964 * math.sqrt(sum((m - mean) ** 2 for m in means) / 3) / 2
    assert got["reward_mean"] == pytest.approx(mean)
    assert got["reward_high"] == pytest.approx(mean + half)
    assert got["reward_low"] == pytest.approx(max(mean - half, 0.0)), "no mean of a prompt is below 0"
    assert summarize(scores, pass_score=0.5)["pass_at_3"] == pytest.approx(3 / 4)


def test_interval_of_one_prompt_is_not_known_and_of_equal_ones_is_a_point() -> None:
    alone = summarize(torch.tensor([[1.0, 0.0]]), 1.0)
    assert math.isnan(alone["reward_low"]) and math.isnan(alone["reward_high"]) and alone["reward_mean"] == 0.5
    equal = summarize(torch.ones(7, 2), 1.0)
    assert equal["reward_low"] == equal["reward_mean"] == equal["reward_high"] == 1.0


def test_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(400):
        rates = [rng.random() for _ in range(60)]  # of passing; their mean is 0.5
        got = summarize(torch.tensor([[float(rng.random() < p) for _ in range(4)] for p in rates]), 1.0)
        held += got["reward_low"] <= 0.5 <= got["reward_high"]
    assert 0.92 <= held / 400 <= 0.98


# ---- checkpoints ------------------------------------------------------------------------------------------------


def trained_and_scored(config: Config) -> dict[str, Any]:
    """Two steps, then what the trainer says of its own weights."""
    os.environ["HPC_RL_LOCAL"] = "1"
    trainer = RLTrainer(config)
    trainer.train()
    out = {
        "metrics": trainer.evaluate(),
        "weights": {k: v.clone() for k, v in trainer.job.actor.shard_map()[1].items()},
    }
    trainer.close()
    return out


def scored(config: Config) -> dict[str, Any]:
    os.environ["HPC_RL_LOCAL"] = "1"
    return evaluate_model(config)


EVAL = {"eval__num_prompts": 40, "eval__samples_per_prompt": 3, "eval__temperature": 0.8, "steps": 2}


def test_a_checkpoint_scores_at_any_layout_as_in_its_run(tmp_path: Path) -> None:
    config = quickstart(run__dir=tmp_path, eval__every=1, **EVAL)
    (run,) = run_ranks(1, trained_and_scored, config)
    expected = {k.removeprefix("eval/"): v for k, v in run["metrics"].items() if "seconds" not in k}
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {k: v for k, v in last.items() if k.startswith("eval/") and "seconds" not in k} == {
        f"eval/{k}": v for k, v in expected.items()
    }
    assert expected["num_prompts"] == 40 and set(expected) >= {"pass_at_1", "pass_at_2", "pass_at_3"}
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    for world_size, layout in ((2, {}), (2, {"parallel__tp": 2}), (1, {})):
        other = quickstart(run__dir=tmp_path, resume="auto", **EVAL, **layout)
        for report in run_ranks(world_size, scored, other):
            assert report["weights"].endswith("checkpoint_2_complete")
            for name, value in expected.items():
                # Rounding may flip one token of 120 samples, no more.
                assert report[name] == pytest.approx(value, abs=1e-9 if layout == {} else 0.02), name
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before, "an evaluation writes nothing"
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    with (tmp_path / "other/tokenizer.json").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="saved with another tokenizer .* use the tokenizer that it was saved with"):
        preflight_eval(quickstart(run__dir=tmp_path, resume="auto", model__tokenizer=tmp_path / "other"), 1)


def test_evaluation_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    runs = [
        run_ranks(1, trained_and_scored, quickstart(run__dir=tmp_path / str(every), eval__every=every, **EVAL))[0]
        for every in (0, 1)
    ]
    assert all(torch.equal(runs[1]["weights"][k], v) for k, v in runs[0]["weights"].items())
    assert runs[0]["metrics"]["eval/reward_mean"] == runs[1]["metrics"]["eval/reward_mean"]


def test_weights_of_a_directory_and_greedy() -> None:
    config = quickstart(eval__num_prompts=64)
    one, again = (run_ranks(1, scored, config)[0] for _ in range(2))
    assert one["weights"].endswith("model") and 0.2 < one["pass_at_1"] < 0.9
    assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in again.items() if k != "seconds"}


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_held_out_responses_are_greedy_unless_told_otherwise(temperature: float) -> None:
    """At temperature 0 each token is the one that plain Hugging Face finds likeliest, at 2 many are not."""
    values = {"eval__temperature": temperature} if temperature else {}
    (drawn,) = run_ranks(1, held_out, quickstart(eval__num_prompts=24, rollout__temperature=1.0, **values))
    model = AutoModelForCausalLM.from_pretrained(ACTOR, dtype=torch.float32).eval()
    likeliest, total = 0, 0
    for prompt, response in drawn:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        likeliest += int((logits.argmax(-1) == torch.tensor(response)).sum())
        total += len(response)
    assert len(drawn) == 24 and total >= 48
    assert likeliest == total if temperature == 0 else likeliest < 0.9 * total


def test_a_checkpoint_without_an_actor_is_refused(tmp_path: Path) -> None:
    config = supervised_config("reward_model", tmp_path, steps=1, eval__every=0)
    run_ranks(1, train_supervised, config, 1)
    with pytest.raises(RankFailed, match=r"UserError.*tensors are not in it \(actor/param"):
        run_ranks(1, scored, quickstart(run__dir=tmp_path, resume="auto"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval__samples_per_prompt": 2}, "eval.samples_per_prompt = 2, but eval.temperature = 0"),
        ({"data__eval_prompts": "null"}, "data.eval_prompts is null"),
        ({"data__eval_prompts": "absent.jsonl"}, "absent.jsonl: no such file"),
        ({"reward__function": "hpc_rl.reward.functions:nothing"}, "has no nothing"),
        ({"resume": "absent"}, "resume = absent: no such directory"),
    ],
)
def test_refused_before_anything_starts(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        preflight_eval(quickstart(run__dir=tmp_path / "run", **values), 1)
    assert not (tmp_path / "run").exists()


def test_training_checks_its_held_out_prompts_first(tmp_path: Path) -> None:
    config = quickstart(run__dir=tmp_path / "run", eval__every=5, data__eval_prompts=tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="absent.jsonl: no such file"):
        preflight(config, 1)


def test_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        run_eval(QUICKSTART, [f"checkpoint={tmp_path / 'absent'}"], as_json=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint_STEP_complete"):
        run_eval(QUICKSTART, [f"checkpoint={tmp_path / 'empty'}"], as_json=True)
