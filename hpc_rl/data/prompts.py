"""Prompts as token ids, in a reproducible order, with a cursor that resumes exactly."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpc_rl.config import Config
from hpc_rl.data.prompt_files import Record, read_records
from hpc_rl.errors import UserError
from hpc_rl.rollout.protocol import Prompt

_TOKENIZE_AT_ONCE = 1024


class PromptSet(Sequence[Prompt]):
    """All prompts of a data set, tokenized. Every rank holds the same.

    ``dropped`` and ``cut`` count the prompts that were longer than ``max_prompt_tokens``; ``fingerprint`` changes when
    any prompt that is left does (its id, tokens or fields, or the order of the files).
    """

    def __init__(
        self,
        records: Iterable[Record],
        tokenizer: Any,
        max_prompt_tokens: int = 1 << 62,
        overlong: Literal["drop", "cut"] = "drop",
        chat_template: Literal["auto", "always", "never"] = "auto",
    ) -> None:
        """Tokenizes ``records`` with an HF tokenizer.

        A text gets the tokenizer's leading special tokens (BOS), never its trailing ones (an EOS would end the prompt);
        a chat template writes its own. ``cut`` drops tokens at the start of the prompt; its text stays whole.

        Raises:
            UserError: chat template missing, prompt of no token, or every prompt dropped.
        """
        self.dropped = 0
        self.cut = 0
        self._ids = array("i")  # token-flat, as Python's integers would take eight times the memory
        self._offsets = array("q", [0])
        self._prompts: list[tuple[int, str, Mapping[str, Any]]] = []
        digest = hashlib.blake2b(digest_size=16)
        for record, text, ids in _tokenize(list(records), tokenizer, chat_template):
            if len(ids) > max_prompt_tokens:
                if overlong == "drop":
                    self.dropped += 1
                    continue
                self.cut += 1
                ids = ids[-max_prompt_tokens:]
            self._ids.extend(ids)
            self._offsets.append(len(self._ids))
            self._prompts.append((record.prompt_id, text, record.fields))
            fields = json.dumps(record.fields, sort_keys=True, default=str)
            digest.update(f"{record.prompt_id}\0{ids}\0{fields}\0".encode())
        self.fingerprint = digest.hexdigest()
        if not self._prompts:
            raise UserError(
                f"all {self.dropped} prompts are longer than data.max_prompt_tokens = {max_prompt_tokens}, and "
                "data.overlong is drop: raise data.max_prompt_tokens, or set data.overlong=cut"
            )

    @staticmethod
    def from_config(
        config: Config, tokenizer: Any, required: Sequence[str] = (), evaluation: bool = False
    ) -> PromptSet:
        """The prompts of ``data.prompts`` (or ``data.eval_prompts``); print its `summary`.

        Args:
            config: the configuration.
            tokenizer: the run's HF tokenizer.
            required: fields that each prompt must have (`RewardFunction.required_fields`).
            evaluation: read the held-out prompts.

        Raises:
            UserError: one line with the value, the rule and the fix.
        """
        data = config.data
        key, paths = ("data.eval_prompts", data.eval_prompts) if evaluation else ("data.prompts", data.prompts)
        if not paths:
            raise UserError(f"{key} is null, but prompts are needed: set it to a JSONL or Parquet file")
        records = read_records(paths, data.format, required)
        return PromptSet(records, tokenizer, data.max_prompt_tokens, data.overlong, data.chat_template)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]  # no slices: one prompt at a time
        prompt_id, text, fields = self._prompts[index]
        index %= len(self._prompts)  # -1 is the last
        ids = self._ids[self._offsets[index] : self._offsets[index + 1]]
        return Prompt(prompt_id, tuple(ids), text, fields)

    def summary(self) -> str:
        """What was read and what became of long prompts, on one line: print it."""
        counts = f"{len(self)} prompts, {len(self._ids)} tokens"
        if self.dropped:
            counts += f", {self.dropped} dropped (longer than data.max_prompt_tokens)"
        if self.cut:
            counts += f", {self.cut} cut at their start to data.max_prompt_tokens"
        return counts

    def prompt_id(self, index: int) -> int:
        """The id of the prompt at ``index``, without building the prompt."""
        return self._prompts[index][0]


def _tokenize(records: Sequence[Record], tokenizer: Any, chat_template: str) -> Iterable[tuple[Record, str, list[int]]]:
    prefix = leading_special_tokens(tokenizer)
    for start in range(0, len(records), _TOKENIZE_AT_ONCE):
        part = records[start : start + _TOKENIZE_AT_ONCE]
        templated = [record.messages is not None or chat_template == "always" for record in part]
        texts = [
            _render(r, tokenizer, chat_template) if t else str(r.text) for r, t in zip(part, templated, strict=True)
        ]
        for record, text in zip(part, texts, strict=True):
            check_characters(f"{record.where}: prompt_id {record.prompt_id}", text)
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for record, text, is_templated, ids in zip(part, texts, templated, encoded, strict=True):
            ids = list(ids) if is_templated else [*prefix, *ids]
            if not ids:
                raise UserError(
                    f"{record.where}: prompt_id {record.prompt_id} is {text!r}, which has no token: write a prompt"
                )
            yield record, text, ids


def check_characters(where: str, text: str) -> None:
    """Refuses half of a surrogate pair, which a Python string may hold and no tokenizer takes. Raises UserError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            f"{where} holds {half!a}, half of a surrogate pair, which is no character: leave it out"
        ) from None


def _render(record: Record, tokenizer: Any, chat_template: str) -> str:
    if chat_template == "never":
        raise UserError(
            f"{record.where}: prompt_id {record.prompt_id} has messages, but data.chat_template is never: set "
            "data.chat_template=auto, or give it text"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{record.where}: prompt_id {record.prompt_id} needs a chat template, but the tokenizer "
            f"{getattr(tokenizer, 'name_or_path', '')!r} has none: give it text and set data.chat_template=never, or "
            "use an instruct model's tokenizer"
        )
    messages = record.messages if record.messages is not None else [{"role": "user", "content": record.text}]
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like (roles that must alternate, ...)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{record.where}: the chat template refuses prompt_id {record.prompt_id} ({reason}): correct its messages"
        ) from None
    return text


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text (BOS, or nothing)."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    special = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start]
    return []


@dataclass(slots=True)
class _Cursor:
    epoch: int = 0
    position: int = 0  # prompts of the epoch that were handed out


class PromptStream:
    """Hands out the prompts of a set step by step, epoch after epoch, and knows where it is.

    Epochs follow each other without a gap: a step may hold the last prompts of one and the first of the next, and each
    epoch holds every prompt once. The order of an epoch depends on (seed, epoch) and the prompt ids alone.
    """

    def __init__(self, prompt_set: PromptSet, seed: int, shuffle: bool, prompts_per_step: int) -> None:
        assert prompts_per_step >= 1, f"prompts_per_step is {prompts_per_step}, must be at least 1"
        self._set = prompt_set
        self._seed = seed
        self._shuffle = shuffle
        self._per_step = prompts_per_step
        self._cursor = _Cursor()
        self._order: list[int] = self._order_of(0)

    def next_step(self) -> list[Prompt]:
        """The prompts of the next step, ``prompts_per_step`` of them."""
        return self.draw(self._per_step)

    def draw(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        drawn: list[Prompt] = []
        while len(drawn) < count:
            if self._cursor.position == len(self._order):
                self._cursor = _Cursor(self._cursor.epoch + 1, 0)
                self._order = self._order_of(self._cursor.epoch)
            start = self._cursor.position
            taken = self._order[start : start + count - len(drawn)]
            self._cursor.position += len(taken)
            drawn += [self._set[index] for index in taken]
        return drawn

    @property
    def num_prompts(self) -> int:
        """Of the set: those of one epoch."""
        return len(self._set)

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0 on, of the prompt that was handed out last."""
        return self._cursor.epoch

    @property
    def epoch(self) -> int:
        """Whole passes over the set that were handed out."""
        return self._cursor.epoch + (self._cursor.position == len(self._order))

    def state(self) -> dict[str, Any]:
        """Where the stream is, as small JSON values."""
        return {
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_prompts": len(self._set),
            "fingerprint": self._set.fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where ``state()`` was taken; ``prompts_per_step`` may differ. Raises: as `check_state`."""
        self.check_state(state)
        self._cursor = _Cursor(int(state["epoch"]), int(state["position"]))
        self._order = self._order_of(self._cursor.epoch)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another data set, seed or shuffling. Raises UserError."""
        if state["fingerprint"] != self._set.fingerprint:
            raise UserError(
                f"the prompts have changed since the checkpoint (fingerprint {state['fingerprint'][:8]}, "
                f"{state['num_prompts']} prompts; now {self._set.fingerprint[:8]}, {len(self._set)} prompts), so its "
                "place in them means nothing: restore the prompt files, data.max_prompt_tokens and the tokenizer, or "
                "start with resume=none"
            )
        for key, name, value in (("seed", "seed", self._seed), ("shuffle", "data.shuffle", self._shuffle)):
            if state[key] != value:
                raise UserError(
                    f"{name} = {value}, but the checkpoint's prompt order came from {name} = {state[key]}: set "
                    f"{name}={str(state[key]).lower()} to resume, or start with resume=none"
                )

    def _order_of(self, epoch: int) -> list[int]:
        """Indices of the set in the order of an epoch: by a hash, which no library's version changes."""
        indices = range(len(self._set))
        if not self._shuffle:
            return list(indices)
        key = f"{self._seed}/{epoch}/".encode()

        def rank(index: int) -> bytes:
            return hashlib.blake2b(key + str(self._set.prompt_id(index)).encode(), digest_size=16).digest()

        return sorted(indices, key=rank)
