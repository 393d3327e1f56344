"""Stop strings, found in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Finds a stop string at the end of the tokens sampled so far.

    Only the tail is decoded at each token: a stop string of n UTF-8 bytes that the last token completes lies within
    the last n tokens, since each of them brought at least one of its bytes; a few more give the decoder its context.
    """

    CONTEXT_TOKENS = 4

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        self.stop = tuple(stop)
        self._tokenizer = tokenizer
        self._tail = max((len(s.encode()) for s in stop), default=0) + self.CONTEXT_TOKENS

    def found(self, response_ids: Sequence[int]) -> bool:
        """Whether the text of the last tokens contains a stop string."""
        if not self.stop:
            return False
        tail = self._tokenizer.decode(response_ids[-self._tail :], skip_special_tokens=False)
        return any(stop in tail for stop in self.stop)
