"""What the loop asks of a rollout engine, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hpc_rl.tensors.shardmap import ShardMap


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenized prompt. ``fields``: all other values of its line in the prompt file, for the reward."""

    prompt_id: int
    input_ids: tuple[int, ...]
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw: the sample'th response to a prompt, with its own seed."""

    prompt: Prompt
    group_id: int  # position of the prompt in the step
    sample_id: int
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished response. The ids are those sampled; they are never re-tokenized."""

    request: Request
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # of the tempered, untruncated distribution, one per response id
    finished: bool  # ended by EOS or a stop string, not by the length limit
    version: int  # of the weights
    text: str  # decoded response, without special tokens
    seconds: float  # from its admission to its end


class RolloutEngine(Protocol):
    """Generates on one replica; every rank of the replica makes the same calls in the same order."""

    def generate(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[Sample], None] | None = None,
        *,
        temperature: float | None = None,
    ) -> list[Sample]:
        """All samples, in the order of ``requests``. ``on_finished`` is called as each one ends.

        ``temperature``: instead of the configuration's; 0: greedy.
        """

    def shard_map(self) -> tuple[ShardMap, Mapping[str, Tensor]]:
        """The live parameters by canonical HF name, and the local tensors that the map speaks of."""

    def set_version(self, version: int) -> None:
        """Stamps new weights: drops the prefix cache. Raises RunError if requests still run."""

    def sleep(self) -> None: ...
    def wake(self, tags: Sequence[str] | None = None) -> None: ...
    def close(self) -> None: ...
