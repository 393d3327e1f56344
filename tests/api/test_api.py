"""The Python API in one plain process, against Hugging Face on the same weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hpc_rl
from hpc_rl.errors import RunError
from hpc_rl.rollout.vllm import preload
from tests.api.jobs import (
    QUICKSTART,
    after_a_failed_start,
    alone,
    generate,
    refusals,
    save_again,
    side_by_side,
    two_trainers,
    values,
)
from tests.rollout.models import canonical, hf_model

pytestmark = pytest.mark.xdist_group("api")
MODEL = QUICKSTART.with_suffix("") / "model"
PROMPTS = ["12+34=", "9+1=", "77+88="]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    preload("cpu")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def generated() -> dict[str, Any]:
    return alone(generate, MODEL, PROMPTS)


@pytest.fixture(scope="module")
def hf() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_names_come_lazily() -> None:
    assert hpc_rl.__version__ == "0.1.0"
    assert set(hpc_rl.__all__) <= set(dir(hpc_rl)) | {name for name in hpc_rl.__all__ if getattr(hpc_rl, name)}
    with pytest.raises(AttributeError, match="no attribute 'Actor': it has ActorModel"):
        _ = hpc_rl.Actor


def test_greedy_generation_is_hugging_faces(generated: dict[str, Any], hf: Any) -> None:
    for prompt, (text, ids, response, finished) in zip(PROMPTS, generated["greedy"], strict=True):
        assert text == prompt
        out = hf.generate(torch.tensor([list(prompt.encode())]), max_new_tokens=6, do_sample=False)
        assert ids == tuple(out[0, len(prompt) :].tolist())
        assert finished == (ids[-1] == 256)
        assert response == bytes(i for i in ids if i < 256).decode()


def test_sampling(generated: dict[str, Any]) -> None:
    assert len(generated["sampled"]) == 3 * len(PROMPTS)
    assert generated["sampled"] == generated["again"]
    assert generated["sampled"] != generated["other seed"]
    assert len(set(generated["sampled"][:3])) > 1, "the samples of a prompt have seeds of their own"
    assert generated["short"] == [1] * len(PROMPTS)
    assert generated["none"] == []


def test_log_probs(generated: dict[str, Any], hf: Any) -> None:
    """The trainer's equal the sampler's, of the whole tempered distribution though top_p cut it, and HF's."""
    assert generated["mismatch"] < 1e-4
    ids = torch.tensor([list(PROMPTS[0].encode())])
    expected = hf(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert generated["text log-probs"] == pytest.approx([0.0, *expected.tolist()], abs=1e-5)


def test_misuse_is_told_in_a_line(tmp_path: Path) -> None:
    expected = [
        r"prompts must be a list .* put it in a list",
        r"prompts must be a list .* put it in a list",
        r"prompts\[0\]: .* needs a chat template, but the tokenizer .* has none",
        r"prompts\[0\]: .* has no token",
        r"prompts\[0\] has 60 tokens, with max_new_tokens = 5 that is 65, but max_model_len is 64: lower",
        r"top_p = 1.5: .* less than or equal to 1",
        r"n = 0: must be at least 1",
        r"temperature = -1: must be at least 0",
        r"prompts\[0\] = \[49, 50\] \(list\) must be a text, or a conversation",
        r"prompts\[0\] = None \(NoneType\) must be a text, or a conversation",
        r"prompts\[0\]: prompt_id 0 holds '\\ud800', half of a surrogate pair",
        r"a sequence holds '\\ud800', half of a surrogate pair",
        r"sequences\[0\] has a token id outside 0 \.\. 257",
        r"sequences\[0\] has no token",
        r"temperature = 0: must be above 0",
        r"model exists: choose another directory",
        r"holds no value head .* so it is no critic",
        r"nowhere: no such directory .* give an HF directory, a run directory or a checkpoint",
        r"config.json cannot be read",
        r"dtype = 'int8': .* 'float32' or 'bfloat16'",
        r"device = 'gpu': .* 'auto', 'cpu' or 'cuda'",
        r"hpc_rl.reward.functions has no nothing: it has",
        r"takes \(prompt\), but is called as \(prompt, response, fields\)",
        r"2 prompts, 1 responses and 2 fields: give as many of each",
        r"the model of .* was closed: load it again",
        r"the model of .* was closed: load it again",
    ]
    messages = alone(refusals, MODEL, tmp_path)
    assert len(messages) == len(expected)
    for message, pattern in zip(messages, expected, strict=True):
        assert "\n" not in message and re.search(pattern, message), f"{message!r} is not {pattern!r}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_pretrained_is_bitwise(tmp_path: Path, dtype: str) -> None:
    """An untied Qwen3, in the dtype that it is stored in."""
    model = hf_model("qwen3", 1).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "in")
    alone(save_again, tmp_path / "in", tmp_path / "out", None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys() == canonical(model).keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype


def test_critic_and_reward_model_are_hugging_faces_classifier(tmp_path: Path) -> None:
    """A sequence classifier saved by transformers: its score is the value after the last token, here and there."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(MODEL, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "classifier")
    for file in MODEL.glob("tokenizer*"):
        (tmp_path / "classifier" / file.name).write_bytes(file.read_bytes())
    texts = ["12+34=46", "9+1=11"]
    found = alone(values, tmp_path / "classifier", texts, tmp_path / "out")
    for i, text in enumerate(texts):
        ids = list(text.encode())
        assert found["ids"][i] == ids
        with torch.no_grad():
            prefixes = [float(model(torch.tensor([ids[:n]])).logits) for n in range(1, len(ids) + 1)]
        assert found["values"][i] == pytest.approx([0.0, *prefixes[:-1]], abs=1e-5)
        assert found["final"][i] == pytest.approx(prefixes[-1], abs=1e-5)
    assert found["reward"] == pytest.approx(found["final"], abs=1e-5)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.config.num_labels == 1
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_reward_model_of_a_function() -> None:
    reward = hpc_rl.RewardModel("hpc_rl.reward.functions:exact_match")
    assert reward.score("1+1=", "2", {"answer": "2"}) == 1.0
    assert reward.scores(["1+1=", "1+2="], ["2", "2"], [{"answer": "2"}, {"answer": "3"}]) == [1.0, 0.0]
    weighted = hpc_rl.RewardModel(lambda prompt, response, fields, weight: weight * len(response), weight=0.5)
    assert weighted.score("", "abcd") == 2.0
    with pytest.raises(RunError, match=r"the reward function failed on .* response 'x': KeyError: 'answer'"):
        hpc_rl.RewardModel(lambda prompt, response, fields: fields["answer"]).score("", "x")


def test_trainers_one_after_the_other(tmp_path: Path) -> None:
    first, second, third = alone(two_trainers, tmp_path)
    assert (first["steps_done"], second["steps_done"], third["steps_done"]) == (2, 1, 2)
    same = {name for name in first if "seconds" not in name and "per_second" not in name}
    assert {name: third[name] for name in same} == {name: first[name] for name in same}
    assert (tmp_path / "a/checkpoints/checkpoint_2_complete/manifest.json").is_file()
    assert alone(values, tmp_path / "b", ["12+34=46"], None)["final"] != [0.0]
    greedy = alone(generate, tmp_path / "b" / "checkpoints" / "checkpoint_1_complete", PROMPTS)["greedy"]
    assert [text for text, *_ in greedy] == PROMPTS


def test_a_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    message, lock_left, steps = alone(after_a_failed_start, tmp_path)
    assert "digest" in message
    assert (lock_left, steps) == (False, 1)


def test_models_beside_a_trainer_and_each_other(tmp_path: Path) -> None:
    """Each answers with weights of its own; one that closes takes nothing from the others."""
    trained, untrained, trained_later, untrained_later = alone(side_by_side, tmp_path / "run", MODEL)
    assert (trained, untrained) == (trained_later, untrained_later)
    assert trained != untrained


def test_a_process_of_a_launcher_is_refused(tmp_path: Path) -> None:
    from tests.ranks import RankFailed, run_ranks

    with pytest.raises(RankFailed, match="lives in one process: start the script without a launcher"):
        run_ranks(2, save_again, MODEL, tmp_path / "out", None)
