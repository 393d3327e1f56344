"""Texts to learn from: a prompt and its response, or a prompt with a chosen and a rejected one, as a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hpc_rl.algo.registry import Objective
from hpc_rl.batch import Batch
from hpc_rl.config import Config
from hpc_rl.data.prompt_files import Record, read_records
from hpc_rl.data.prompts import PromptSet
from hpc_rl.errors import UserError
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.rollout.sampler import samples_to_batch


class Examples:
    """The lines of a data set, each with the responses that ``goal`` learns from. Every rank holds the same.

    One line: a prompt as in any prompt file (``prompt_id`` and ``text`` or ``messages``), and ``response``, or
    ``chosen`` and ``rejected``. A response is tokenized by itself and ends with EOS, as a sampled one does; a reward
    model reads its text alone. ``num_overlong`` counts the lines with a response above ``rollout.max_response_tokens``,
    EOS included: dropped or cut as ``data.overlong`` says.
    """

    def __init__(self, config: Config, goal: Objective, tokenizer: Any, evaluation: bool = False) -> None:
        """Raises: UserError naming file and line for what is wrong in it."""
        self._goal, self._tokenizer = goal, tokenizer
        self._limit = config.rollout.max_response_tokens
        self.num_overlong = 0
        data = config.data
        paths = data.eval_prompts if evaluation else data.prompts
        assert paths, "preflight refuses a configuration without data"
        records = read_records(paths, data.format, goal.fields, "algorithm.name")
        kept = list(self._fitting(records, drop=data.overlong == "drop"))
        if not kept:
            raise UserError(
                f"all {len(records)} lines of {paths} have a response longer than rollout.max_response_tokens = "
                f"{self._limit}, and data.overlong is drop: raise it, or set data.overlong=cut"
            )
        self.prompts = PromptSet(kept, tokenizer, data.max_prompt_tokens, data.overlong, data.chat_template)

    def _fitting(self, records: Sequence[Record], drop: bool) -> Iterator[Record]:
        for record in records:
            for name in self._goal.fields:
                if not isinstance(record.fields[name], str):
                    raise UserError(
                        f"{record.where}: {name} = {str(record.fields[name])[:60]!r} must be a string: write the "
                        "response there"
                    )
            overlong = any(len(self._response(record.fields[name])) > self._limit for name in self._goal.fields)
            self.num_overlong += overlong
            if not (overlong and drop):
                yield record

    def summary(self) -> str:
        """What was read, and what became of long texts, on one line."""
        overlong = f", {self.num_overlong} responses above rollout.max_response_tokens" if self.num_overlong else ""
        return self.prompts.summary() + overlong

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        """The sequences of these lines: ``input_ids``, ``position_ids``, ``response_mask`` (what is learned), ids.

        Pairs are neighbours, chosen first. For a reward model the mask holds one more token at the end of each
        sequence: its value is the score of all before it.
        """
        samples = []
        for line, prompt in enumerate(prompts):
            for place, name in enumerate(self._goal.fields):
                ids = self._response(prompt.fields[name])[: self._limit]
                ids += [self._tokenizer.eos_token_id] * (self._goal.role == "critic")
                samples.append(Sample(Request(prompt, line, place, 0), tuple(ids), (0.0,) * len(ids), True, 0, "", 0.0))
        batch = samples_to_batch(samples)
        if len(self._goal.fields) == 2:
            batch = batch.with_sequences(pair_ids=batch["group_ids"])
        if self._goal.role == "critic":
            is_last = torch.zeros(batch.num_tokens, dtype=torch.bool)
            is_last[batch.cu_seqlens[1:] - 1] = True
            batch = batch.with_tokens(response_mask=is_last)
        return batch

    def _response(self, text: str) -> list[int]:
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if self._goal.role == "critic" else [*ids, self._tokenizer.eos_token_id]
