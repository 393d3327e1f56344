"""What the quickstart reads, and the script that made it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_rl.config_load import load_config
from hpc_rl.data.prompts import PromptSet
from hpc_rl.data.tasks import addition
from hpc_rl.data.tasks.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer
from hpc_rl.reward.functions import exact_match

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart"
TOKENIZER = byte_tokenizer(64)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@settings(deadline=None)
@given(st.text().filter(lambda text: "<|" not in text))  # special tokens are read as such
def test_ids_are_bytes(text: str) -> None:
    raw = list(text.encode("utf-8", "surrogatepass"))
    assert TOKENIZER.encode(text) == raw, "nothing added, nothing merged"
    assert TOKENIZER.decode(raw) == text


def test_special_tokens() -> None:
    assert (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, len(TOKENIZER)) == (EOS_ID, PAD_ID, VOCAB_SIZE)
    assert TOKENIZER.encode("7<|endoftext|><|pad|>") == [ord("7"), EOS_ID, PAD_ID]
    assert TOKENIZER.decode([ord("7"), EOS_ID, PAD_ID], skip_special_tokens=True) == "7"


def test_checked_in_tokenizer_is_the_one_that_the_script_makes(tmp_path: Path) -> None:
    addition.byte_tokenizer(addition.MAX_TOKENS).save_pretrained(tmp_path)
    kept = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(
        (QUICKSTART / "model/tokenizer.json").read_text()
    )
    assert kept.encode("12+34=") == list(b"12+34=")
    assert kept.eos_token_id == EOS_ID
    assert kept.model_max_length == addition.MAX_TOKENS


def test_checked_in_prompts_are_those_that_the_script_writes(tmp_path: Path) -> None:
    train, held_out = addition.split_pairs(seed=0)
    addition.write_prompts(tmp_path / "prompts.jsonl", train[: addition.NUM_TRAIN], first_id=addition.NUM_EVAL)
    addition.write_prompts(tmp_path / "eval.jsonl", held_out, first_id=0)
    for name in ("prompts.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes()


def test_held_out_sums_are_not_trained_on_and_all_answers_are_right() -> None:
    train, held_out = lines(QUICKSTART / "prompts.jsonl"), lines(QUICKSTART / "eval.jsonl")
    assert (len(train), len(held_out)) == (4096, 512)
    assert not {r["text"] for r in train} & {r["text"] for r in held_out}
    assert len({r["prompt_id"] for r in train + held_out}) == 4096 + 512
    for record in train + held_out:
        a, b = record["text"].removesuffix("=").split("+")
        assert record["answer"] == str(int(a) + int(b))


def test_the_configuration_reads_them() -> None:
    config = load_config(CONFIGS / "quickstart.yaml", [])
    prompts = PromptSet.from_config(config, AutoTokenizer.from_pretrained(config.model.path), required=("answer",))
    assert (len(prompts), prompts.dropped) == (4096, 0)
    prompt = prompts[0]
    assert bytes(prompt.input_ids).decode() == prompt.text
    assert exact_match(prompt.text, prompt.fields["answer"], prompt.fields) == 1
    longest = max(len(r["answer"]) for r in lines(QUICKSTART / "prompts.jsonl")) + 1
    assert config.rollout.max_response_tokens == longest == addition.ANSWER_TOKENS, "room for the end of text, no more"


def test_model_is_small_and_adds_badly() -> None:
    size = sum(file.stat().st_size for file in (QUICKSTART / "model").iterdir())
    assert size < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    assert next(model.parameters()).dtype == torch.float32
    for pairs in (addition.split_pairs(0)[1], addition.split_pairs(0)[0][:1024]):
        sampled, greedy = addition.accuracy(model, pairs)
        assert 0.2 < sampled < 0.4
        assert greedy < 0.7


def test_accuracy_is_that_of_sampling() -> None:
    """The exact probability of the right answer against a count over draws."""
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    pairs = addition.split_pairs(0)[1]
    torch.manual_seed(0)
    ids = addition.encode(pairs, [0] * len(pairs))[0][:, : addition.PROMPT_TOKENS]
    for _ in range(addition.ANSWER_TOKENS):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1].softmax(-1).multinomial(1)], dim=1)
    texts = [TOKENIZER.decode(row[addition.PROMPT_TOKENS :]).split("<|endoftext|>")[0] for row in ids.tolist()]
    count = sum(text == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True)) / len(pairs)
    assert count == pytest.approx(addition.accuracy(model, pairs)[0], abs=0.06)  # three standard deviations


def test_careless_answers_have_the_stated_shares() -> None:
    rng, n = random.Random(0), 20_000
    carried = [addition.careless_answer((47, 38), rng) - 85 for _ in range(n)]  # 7 + 8 carries
    not_carried = [addition.careless_answer((41, 32), rng) - 73 for _ in range(n)]
    for errors, wrong in ((carried, -10), (not_carried, 10)):
        assert set(errors) == {0, -1, 1, wrong, wrong - 1, wrong + 1}
        in_carry = sum(abs(e) > 5 for e in errors) / n
        slipped = sum(e % 10 != 0 for e in errors) / n
        assert in_carry == pytest.approx(addition.WRONG_CARRY_SHARE, abs=0.02)
        assert slipped == pytest.approx(addition.SLIP_SHARE, abs=0.02)


def test_the_script_is_reproducible_and_writes_a_whole_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(addition, "CLEAN_STEPS", 3)
    monkeypatch.setattr(addition, "CARELESS_STEPS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name in ("one", "two"):
            assert addition.main([str(tmp_path / name)]) == 0
        assert torch.get_num_threads() == 1, "the sums of more threads make another model"
        assert addition.main([str(tmp_path / "other"), "--seed", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    one, two, other = ((tmp_path / n / "model/model.safetensors").read_bytes() for n in ("one", "two", "other"))
    assert one == two
    assert one != other
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["eval.jsonl", "model", "prompts.jsonl"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "one/model")
    assert (tmp_path / "one/prompts.jsonl").read_bytes() == (QUICKSTART / "prompts.jsonl").read_bytes()
    (tmp_path / "file").write_text("")
    assert addition.main([str(tmp_path / "file/below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_learning_rate_has_both_phases() -> None:
    rates = [addition.learning_rate(s) for s in range(addition.CLEAN_STEPS + addition.CARELESS_STEPS)]
    assert max(rates) == addition.PEAK_LR == rates[addition.WARMUP_STEPS]
    assert rates[0] < 0.03 * addition.PEAK_LR
    assert rates[addition.CLEAN_STEPS - 1] < 0.1 * addition.PEAK_LR < rates[addition.CLEAN_STEPS]
    assert rates[-1] < 0.01 * addition.PEAK_LR
