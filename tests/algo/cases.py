"""Golden cases (golden/README.md) and their conversion from padded [B, T] arrays to token-flat ones."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_rl.batch import cumulative

GOLDEN = Path(__file__).parent / "golden"
LAYOUTS = ("padded", "trimmed")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """One recorded call of a public implementation: float64 tensors (lists of str for ids)."""

    name: str
    fn: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Tensor]
    raises: bool
    informational: bool  # a float32 artefact of the peer

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]


def _decode(entry: dict[str, Any]) -> Any:
    if entry["dtype"] == "str":
        return entry["data"]
    dtype = torch.float64 if entry["dtype"].startswith("float") else torch.int64
    return torch.tensor([float(x) for x in entry["data"]], dtype=torch.float64).to(dtype).reshape(entry["shape"])


@cache
def load(name: str) -> tuple[Case, ...]:
    """All cases of one file, e.g. ``gae``."""
    with gzip.open(GOLDEN / f"{name}.json.gz", "rt") as file:
        cases = json.load(file)["cases"]
    return tuple(
        Case(
            c["name"],
            c["fn"],
            c["params"],
            {k: _decode(v) for k, v in c["inputs"].items()},
            {} if "raises" in c["expected"] else {k: _decode(v) for k, v in c["expected"].items()},
            "raises" in c["expected"],
            bool(c.get("informational")),
        )
        for c in cases
    )


class Flat:
    """A padded [B, T] case as B token-flat sequences.

    padded: all T tokens of a row, those outside the mask in place. trimmed: a token outside the mask whose every value
    is NaN, then the row from its first to its last masked token, so that lengths differ and a row may be empty.
    """

    def __init__(self, mask: Tensor, layout: str) -> None:
        self.shape = mask.shape
        rows = [self._row(row.bool(), b, layout) for b, row in enumerate(mask)]
        self.index = torch.tensor([i for row in rows for i in row])
        self.cu_seqlens = cumulative(torch.tensor([len(row) for row in rows]))
        self.poison = self.index < 0
        self.mask = self(mask).nan_to_num().bool()

    def _row(self, mask: Tensor, b: int, layout: str) -> list[int]:
        width = mask.numel()
        if layout == "padded":
            return list(range(b * width, (b + 1) * width))
        where = mask.nonzero().flatten().tolist()
        return [-1, *(range(b * width + where[0], b * width + where[-1] + 1) if where else ())]

    def __call__(self, padded: Tensor) -> Tensor:
        """[B, T] -> [N]."""
        return padded.reshape(-1)[self.index.clamp(min=0)].masked_fill(self.poison, float("nan"))

    def padded(self, flat: Tensor) -> Tensor:
        """[N] -> [B, T], zeros where the layout has no token."""
        result = torch.zeros(self.shape, dtype=flat.dtype).reshape(-1)
        result[self.index[~self.poison]] = flat[~self.poison]
        return result.reshape(self.shape)

    def check(self, flat: Tensor, expected: Tensor) -> None:
        """``flat`` equals the padded ``expected`` inside the mask and is 0 outside."""
        close(flat[self.mask], self(expected)[self.mask])
        assert (flat[~self.mask] == 0).all()


def close(actual: Any, expected: Any) -> None:
    """Equal within 1e-6, absolute and relative; NaN equals nothing."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, check_dtype=False)


def integers(names: list[str]) -> Tensor:
    """Group names -> int64 ids, in an order unlike that of the names' first appearance."""
    order = {name: 7 - 3 * i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([order[name] for name in names])
