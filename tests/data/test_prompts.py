from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_rl.config import Config, DataConfig, ModelConfig
from hpc_rl.data.prompt_files import Record
from hpc_rl.data.prompts import PromptSet, PromptStream
from hpc_rl.data.tokenizer import load_tokenizer, tokenizer_facts
from tests.config.refusal import refused
from tests.data.models import write_tokenizer


def load(directory: Path, **kwargs: Any) -> Any:
    write_tokenizer(directory, **kwargs)
    return load_tokenizer(Config(model=ModelConfig(tokenizer=str(directory))))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("tokenizer"))


def record(prompt_id: int, text: str | None = None, messages: Any = None, **fields: Any) -> Record:
    return Record(prompt_id, text, messages, fields, f"file line {prompt_id}")


def texts(*values: str) -> list[Record]:
    return [record(number, text) for number, text in enumerate(values, 10)]


def test_text_and_messages(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]
    prompts = PromptSet([record(3, "ab", answer="x"), record(4, messages=chat)], tokenizer)
    assert len(prompts) == 2
    assert prompts[0].input_ids == tuple(tokenizer.convert_tokens_to_ids(["a", "b"]))
    assert (prompts[0].prompt_id, prompts[0].text, prompts[0].fields) == (3, "ab", {"answer": "x"})
    assert prompts[1].text == "<system>s\n<user>1+1\n<assistant>"
    assert tokenizer.decode(prompts[1].input_ids) == prompts[1].text
    assert [p.prompt_id for p in prompts] == [3, 4]
    assert prompts[-1] == prompts[1]


def test_template_always_wraps_text(tokenizer: Any) -> None:
    prompts = PromptSet(texts("q"), tokenizer, chat_template="always")
    assert prompts[0].text == "<user>q\n<assistant>"


def test_leading_special_tokens_but_no_eos(tmp_path: Path) -> None:
    framing = load(tmp_path, bos=True)
    prompts = PromptSet([record(1, "ab"), record(2, messages=[{"role": "user", "content": "ab"}])], framing)
    assert framing("ab")["input_ids"][-1] == framing.eos_token_id, "this tokenizer ends a text with EOS"
    assert framing.convert_ids_to_tokens(prompts[0].input_ids) == ["<bos>", "a", "b"]
    assert framing.bos_token_id not in prompts[1].input_ids, "a template writes its own"


def test_long_prompts_are_dropped_or_cut_and_counted(tokenizer: Any) -> None:
    records = texts("abcd", "abc", "abcdef")
    dropped = PromptSet(records, tokenizer, max_prompt_tokens=3, overlong="drop")
    assert [p.text for p in dropped] == ["abc"]
    assert (dropped.dropped, dropped.cut) == (2, 0)
    assert "1 prompts, 3 tokens, 2 dropped" in dropped.summary()
    cut = PromptSet(records, tokenizer, max_prompt_tokens=3, overlong="cut")
    assert [tokenizer.decode(p.input_ids) for p in cut] == ["bcd", "abc", "def"], "the end stays: it holds the question"
    assert (cut.dropped, cut.cut) == (0, 2)
    assert "2 cut at their start" in cut.summary()
    assert "dropped" not in PromptSet(records, tokenizer).summary()


def test_refusals(tokenizer: Any, tmp_path: Path) -> None:
    with refused("all 2 prompts", "longer than data.max_prompt_tokens = 1", "data.overlong=cut"):
        PromptSet(texts("ab", "cd"), tokenizer, max_prompt_tokens=1)
    chat = [record(4, messages=[{"role": "user", "content": "a"}])]
    with refused("file line 4: prompt_id 4", "data.chat_template is never", "data.chat_template=auto"):
        PromptSet(chat, tokenizer, chat_template="never")
    plain = load(tmp_path / "plain", chat_template=None)
    with refused("file line 4: prompt_id 4", "has none", "instruct model's tokenizer"):
        PromptSet(chat, plain)
    strict = load(tmp_path / "strict", chat_template="{{ raise_exception('roles must alternate') }}")
    with refused("file line 4", "refuses prompt_id 4 (roles must alternate)", "correct its messages"):
        PromptSet(chat, strict)
    silent = load(tmp_path / "silent", chat_template="{{ '' }}")
    with refused("prompt_id 4 is ''", "has no token", "write a prompt"):
        PromptSet(chat, silent)


def test_tokenizer_refusals(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "a", eos=None)
    (tmp_path / "b").mkdir()
    for directory, rule, fix in (
        ("a", "has no eos_token", "set eos_token"),
        ("b", "no tokenizer that can be loaded", "tokenizer.json"),
        ("c", "no such directory", "correct model.tokenizer"),
    ):
        with refused(f"model.tokenizer = {tmp_path / directory}", rule, fix):
            load_tokenizer(Config(model=ModelConfig(tokenizer=str(tmp_path / directory))))


def test_facts_are_those_of_the_loaded_tokenizer(tmp_path: Path) -> None:
    loaded = load(tmp_path, extra=3)
    facts = tokenizer_facts("model.tokenizer", str(tmp_path))
    assert facts.vocab == loaded.get_vocab()
    assert (facts.eos_token, facts.num_ids) == (loaded.eos_token, len(loaded))
    loaded.save_pretrained(tmp_path / "saved")  # as transformers writes it
    assert tokenizer_facts("model.tokenizer", str(tmp_path / "saved")) == facts


def test_prompts_of_a_configuration(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt_id": i, "text": "x" * i}) + "\n" for i in range(1, 6)))
    config = Config(data=DataConfig(prompts=str(path), max_prompt_tokens=3, overlong="cut"))
    prompts = PromptSet.from_config(config, tokenizer)
    assert ([len(p.input_ids) for p in prompts], prompts.cut) == ([1, 2, 3, 3, 3], 2)
    with refused("data.eval_prompts is null", "needed", "JSONL or Parquet"):
        PromptSet.from_config(config, tokenizer, evaluation=True)
    with refused("line 1", "field answer is missing", "add it"):
        PromptSet.from_config(config, tokenizer, required=("answer",))


# The stream ----------------------------------------------------------------------------------------------------------


def ids(step: list[Any]) -> list[int]:
    return [prompt.prompt_id for prompt in step]


@pytest.fixture(scope="module")
def make_set(tokenizer: Any) -> Callable[[int], PromptSet]:
    return lambda count: PromptSet(texts(*(f"prompt {i}" for i in range(count))), tokenizer)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 3), st.booleans(), st.integers(0, 20), st.data())
def test_every_epoch_has_every_prompt_once_and_resume_is_exact(
    make_set: Callable[[int], PromptSet], count: int, per_step: int, seed: int, shuffle: bool, stop: int, data: Any
) -> None:
    prompts = make_set(count)
    whole = PromptStream(prompts, seed, shuffle, per_step)
    steps = [ids(whole.next_step()) for _ in range(24)]
    assert all(len(step) == per_step for step in steps)
    flat = [i for step in steps for i in step]
    epochs = [flat[i : i + count] for i in range(0, len(flat) - count + 1, count)]
    assert all(sorted(epoch) == [p.prompt_id for p in prompts] for epoch in epochs), "skipped or repeated"
    if not shuffle:
        assert all(epoch == epochs[0] == sorted(epoch) for epoch in epochs)

    killed = PromptStream(prompts, seed, shuffle, per_step)
    for _ in range(stop):
        killed.next_step()
    state = json.loads(json.dumps(killed.state()))
    resumed = PromptStream(make_set(count), seed, shuffle, per_step)
    for _ in range(data.draw(st.integers(0, 5))):
        resumed.next_step()  # wherever it was before
    resumed.load_state(state)
    assert resumed.state() == state
    assert [ids(resumed.next_step()) for _ in range(24 - stop)] == steps[stop:]


def test_another_number_of_prompts_per_step_goes_on_at_the_same_place(make_set: Callable[[int], PromptSet]) -> None:
    first = PromptStream(make_set(7), 0, True, 3)
    other = PromptStream(make_set(7), 0, True, 1)
    flat = ids(first.next_step()) + ids(first.next_step())
    other.load_state(first.state())
    rest = [ids(other.next_step())[0] for _ in range(8)]
    assert sorted(flat + rest[:1]) == sorted(p.prompt_id for p in make_set(7))
    assert sorted(rest[1:8]) == sorted(flat + rest[:1])


def test_order_depends_on_seed_and_epoch_only(make_set: Callable[[int], PromptSet], tokenizer: Any) -> None:
    def epochs(prompts: PromptSet, seed: int) -> list[list[int]]:
        stream = PromptStream(prompts, seed, True, 20)
        return [ids(stream.next_step()) for _ in range(3)]

    prompts = make_set(20)
    first = epochs(prompts, 1)
    assert first == epochs(prompts, 1)
    assert len({tuple(e) for e in first + epochs(prompts, 2)}) == 6, "each epoch and seed has its own order"
    backwards = PromptSet(list(reversed(texts(*(f"prompt {i}" for i in range(20))))), tokenizer)
    assert epochs(backwards, 1) == first, "the order of the files does not matter"
    # Held for good: a run resumed under another version must go on in the same order.
    assert first[0][:6] == [10, 16, 29, 11, 15, 12]


def test_shuffling_is_fair(make_set: Callable[[int], PromptSet]) -> None:
    stream = PromptStream(make_set(4), 0, True, 4)
    first = Counter(ids(stream.next_step())[0] for _ in range(400))
    assert all(70 <= count <= 130 for count in first.values()), first  # 100 +- 3.5 standard deviations


def test_epoch_counts_whole_passes(make_set: Callable[[int], PromptSet]) -> None:
    stream = PromptStream(make_set(4), 0, True, 3)
    seen = []
    for _ in range(4):
        stream.next_step()
        seen.append(stream.epoch)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "changed",
    [
        [record(1, "a", answer="1"), record(2, "b", answer="3")],
        [record(1, "a", answer="1"), record(2, "c", answer="2")],
        [record(1, "a", answer="1"), record(3, "b", answer="2")],
        [record(1, "a", answer="1")],
        [record(2, "b", answer="2"), record(1, "a", answer="1")],
    ],
)
def test_changed_data_is_refused(tokenizer: Any, changed: list[Record]) -> None:
    old = PromptSet([record(1, "a", answer="1"), record(2, "b", answer="2")], tokenizer)
    state = PromptStream(old, 0, True, 1).state()
    stream = PromptStream(PromptSet(changed, tokenizer), 0, True, 1)
    with refused("prompts have changed since the checkpoint", state["fingerprint"][:8], "restore the prompt files"):
        stream.load_state(state)


def test_changed_seed_or_shuffle_is_refused(make_set: Callable[[int], PromptSet]) -> None:
    state = PromptStream(make_set(3), 1, True, 1).state()
    with refused("seed = 2", "order came from seed = 1", "set seed=1 to resume"):
        PromptStream(make_set(3), 2, True, 1).load_state(state)
    with refused("data.shuffle = False", "data.shuffle = True", "set data.shuffle=true to resume"):
        PromptStream(make_set(3), 1, False, 1).load_state(state)
