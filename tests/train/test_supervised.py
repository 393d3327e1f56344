"""Training without rollouts against plain Hugging Face, its resume, its data and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.algo.registry import OBJECTIVES
from hpc_rl.config_load import load_config
from hpc_rl.data.examples import Examples
from hpc_rl.data.tokenizer import load_tokenizer
from hpc_rl.errors import UserError
from hpc_rl.preflight import preflight
from hpc_rl.supervised import SupervisedTrainer
from hpc_rl.train import RLTrainer
from tests.ranks import RankFailed, run_ranks
from tests.train.supervised import CONFIGS, NAMES, Plain, config_of, train

MODEL = CONFIGS / "quickstart" / "model"
pytestmark = pytest.mark.xdist_group("train")


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    expected = None
    for world_size, values in ((1, {}), (2, {"algorithm__micro_batch_tokens": 24})):
        config = config_of(name, tmp_path / str(world_size), steps=3, checkpoint__every=0, **values)
        result = run_ranks(world_size, train, config, 3)[0]
        if expected is None:
            plain = Plain(name)
            expected = [plain.step(batch) for batch in result["batches"]]
            assert len({round(loss, 4) for loss, _ in expected}) == 3, "the loss does not move"
        for (loss, norm), metrics in zip(expected, result["metrics"], strict=True):
            assert metrics["loss"] == pytest.approx(loss, rel=2e-5, abs=2e-6)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_resume_is_bitwise(name: str, tmp_path: Path) -> None:
    def config(run: str, **values: Any) -> Any:
        return config_of(name, tmp_path / run, steps=4, checkpoint__every=2, eval__every=1, **values)

    whole = run_ranks(2, train, config("whole"), 4)[0]
    run_ranks(2, train, config("cut"), 2)
    resumed = run_ranks(2, train, config("cut", resume="auto"), 4)[0]
    assert len(resumed["metrics"]) == 2
    assert all(torch.equal(resumed["weights"][key], value) for key, value in whole["weights"].items())
    lines = {run: _figures(tmp_path / run) for run in ("whole", "cut")}
    assert lines["whole"] == lines["cut"] and len(lines["cut"]) == 4
    assert lines["cut"][-1]["eval/loss"] == whole["held_out"]["eval/loss"] != lines["cut"][0]["eval/loss"]


def _figures(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


# ---- data -------------------------------------------------------------------------------------------------------

LINES = [
    {"prompt_id": 1, "text": "1+1=", "response": "2", "chosen": "2", "rejected": "13"},
    {"prompt_id": 2, "text": "5+5=", "response": "1000", "chosen": "10", "rejected": "55555"},
]


def examples_of(tmp_path: Path, name: str, lines: list[dict[str, Any]], **overrides: Any) -> Examples:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = config_of(name, tmp_path, data__prompts=path, data__shuffle="false", **overrides)
    return Examples(config, OBJECTIVES[name], load_tokenizer(config))


def texts_of(examples: Examples) -> list[tuple[str, str]]:
    """(whole sequence, what is learned of it), with | for EOS."""
    batch = examples.batch([examples.prompts[i] for i in range(len(examples.prompts))])
    tokenizer, out = examples._tokenizer, []
    for lo, hi in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids, mask = batch["input_ids"][lo:hi], batch["response_mask"][lo:hi]
        assert batch["position_ids"][lo:hi].tolist() == list(range(hi - lo))
        out.append(tuple("".join("|" if i == tokenizer.eos_token_id else chr(i) for i in x) for x in (ids, ids[mask])))
    return out


def test_sft_learns_the_response_and_its_end(tmp_path: Path) -> None:
    assert texts_of(examples_of(tmp_path, "sft", LINES, rollout__max_response_tokens=5)) == [
        ("1+1=2|", "2|"),
        ("5+5=1000|", "1000|"),
    ]


def test_pairs_are_neighbours(tmp_path: Path) -> None:
    examples = examples_of(tmp_path, "dpo", LINES, rollout__max_response_tokens=6)
    assert [learned for _, learned in texts_of(examples)] == ["2|", "13|", "10|", "55555|"]
    batch = examples.batch([examples.prompts[1], examples.prompts[0]])
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1] and batch["prompt_ids"].tolist() == [2, 2, 1, 1]


def test_a_reward_model_scores_the_whole_text(tmp_path: Path) -> None:
    """The one masked token is not part of the text: its value is that of the state after the last one."""
    found = texts_of(examples_of(tmp_path, "reward_model", LINES, rollout__max_response_tokens=6))
    assert found == [("1+1=2|", "|"), ("1+1=13|", "|"), ("5+5=10|", "|"), ("5+5=55555|", "|")]


def test_long_responses_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    dropped = examples_of(tmp_path, "dpo", LINES, rollout__max_response_tokens=3)
    assert len(dropped.prompts) == 1 and dropped.num_overlong == 1
    assert "1 responses above rollout.max_response_tokens" in dropped.summary()
    cut = examples_of(tmp_path, "dpo", LINES, rollout__max_response_tokens=3, data__overlong="cut")
    assert [learned for _, learned in texts_of(cut)] == ["2|", "13|", "10|", "555"]
    with pytest.raises(UserError, match="all 2 lines .* longer than rollout.max_response_tokens = 1"):
        examples_of(tmp_path, "sft", LINES, rollout__max_response_tokens=1)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "sft",
            {"data__prompts": CONFIGS / "quickstart" / "prompts.jsonl"},
            "field response is missing.*algorithm.name",
        ),
        (
            "dpo",
            {"data__eval_prompts": CONFIGS / "quickstart" / "eval.jsonl"},
            "field chosen is missing.*algorithm.name",
        ),
        ("sft", {"algorithm__epochs": 2}, "algorithm.epochs = 2 is for rollouts, but algorithm.name = sft has none"),
        ("dpo", {"algorithm__mini_batches": 2}, "algorithm.mini_batches = 2 is for rollouts"),
        ("dpo", {"data__oversample": 2}, "data.oversample = 2.0 is for rollouts"),
        ("sft", {"data__reward_min": 0}, "data.reward_min = 0.0 is for rollouts.*reward_min=null"),
        ("dpo", {"algorithm__kl_placement": "loss"}, "kl_placement = loss, but algorithm.name = dpo has no KL penalty"),
        ("sft", {"rollout__temperature": 0.7}, "rollout.temperature = 0.7 would change the log-probs"),
        ("sft", {"model__reference_path": MODEL}, "reference_path = .*, but algorithm.name = sft has no reference"),
        ("dpo", {"model__critic_path": MODEL}, "critic_path = .*, but algorithm.name = dpo has no critic"),
        ("ipo", {"algorithm__label_smoothing": 0.1}, "label_smoothing = 0.1 would be ignored, for algorithm.name = ipo"),
        ("sft", {"algorithm__reward_center": 0.1}, "reward_center = 0.1 would be ignored, for algorithm.name = sft"),
        ("sft", {"data__eval_prompts": "null"}, "eval.every = 20 needs held-out prompts"),
    ],
)
def test_refused_before_anything_starts(name: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as raised:
        preflight(config_of(name, tmp_path / "run", **values), 1)
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sorted(set(NAMES.values())))
def test_shipped_configurations_are_accepted(name: str, tmp_path: Path) -> None:
    preflight(load_config(CONFIGS / name, [f"run.dir={tmp_path / 'run'}"]), 2)


def test_a_response_must_be_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lines.jsonl line 2: response = '7' must be a string"):
        examples_of(tmp_path, "sft", [LINES[0], {**LINES[1], "response": 7}])


def test_the_best_by_a_metric_that_no_step_has_is_refused_at_the_first(tmp_path: Path) -> None:
    config = config_of("sft", tmp_path / "run", steps=2, checkpoint__keep_best="grad_nrom")
    with pytest.raises(RankFailed, match="keep_best = grad_nrom, but .* no such metric: .* such as grad_norm"):
        run_ranks(1, train, config, 2)
    assert len(_figures(tmp_path / "run")) == 1


def test_each_trainer_refuses_the_others_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="algorithm.name = sft has no rollouts"):
        RLTrainer(config_of("sft", tmp_path))
    with pytest.raises(UserError, match="algorithm.name = grpo learns from rollouts: use RLTrainer"):
        SupervisedTrainer(load_config(CONFIGS / "grpo_addition.yaml", []))
