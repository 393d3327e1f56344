"""Which prompts come: those of the stream, but for those that were too easy or too hard when they came last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_rl.config import DataConfig
from hpc_rl.data.prompts import PromptStream
from hpc_rl.rollout.protocol import Prompt


class Curriculum:
    """Draws prompts and remembers which to leave out; the same on every rank.

    A prompt whose group scored outside [``data.reward_min``, ``data.reward_max``] on average is passed over for
    ``data.reward_memory_epochs`` epochs, then tried again: the policy has changed by then.
    """

    def __init__(self, stream: PromptStream, config: DataConfig) -> None:
        self._stream, self._config = stream, config
        self._back_at: dict[int, int] = {}  # prompt id -> first epoch in which it may come again

    @property
    def num_left_out(self) -> int:
        """Prompts that would be passed over now."""
        return sum(epoch > self._stream.current_epoch for epoch in self._back_at.values())

    def draw(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts that may come. If a whole epoch has none left, all may come again."""
        drawn: list[Prompt] = []
        passed_over = 0
        while len(drawn) < count:
            (prompt,) = self._stream.draw(1)
            if self._back_at.get(prompt.prompt_id, 0) <= self._stream.current_epoch:
                drawn.append(prompt)
                passed_over = 0
                continue
            passed_over += 1
            if passed_over == self._stream.num_prompts:
                self._back_at.clear()
        return drawn

    def learn(self, prompt_ids: Sequence[int], mean_scores: Sequence[float]) -> None:
        """Takes note of what each prompt's group scored on average."""
        low, high = self._config.reward_min, self._config.reward_max
        for prompt_id, score in zip(prompt_ids, mean_scores, strict=True):
            if (low is not None and score < low) or (high is not None and score > high):
                self._back_at[prompt_id] = self._stream.current_epoch + 1 + self._config.reward_memory_epochs
            else:
                self._back_at.pop(prompt_id, None)

    def state(self) -> dict[str, Any]:
        """What a resume needs beside the stream's own state, as small JSON values."""
        now = self._stream.current_epoch
        return {"back_at": {str(prompt_id): epoch for prompt_id, epoch in self._back_at.items() if epoch > now}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes ``state()`` back, after the stream's."""
        self._back_at = {int(prompt_id): int(epoch) for prompt_id, epoch in state.get("back_at", {}).items()}
