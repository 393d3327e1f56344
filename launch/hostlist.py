"""Slurm's compressed notations, read without asking Slurm."""

from __future__ import annotations

import re

from hpc_rl.errors import UserError


def expand_hosts(text: str) -> tuple[str, ...]:
    """``node[1-3,07],gpu-a`` -> node1 node2 node3 node07 gpu-a; several brackets in a name multiply out."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            choices = [literal] if literal else _expand_ranges(ranges, text)
            names = [name + choice for name in names for choice in choices]
        hosts += names
    if not hosts or text.count("[") != text.count("]"):
        raise UserError(f"node list {text!r} cannot be read: expected a list such as node[1-3,7],gpu1")
    return tuple(hosts)


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise UserError(f"node list {text!r} cannot be read at {item!r}: expected ranges such as [1-3,7]")
        first, last = match[1], match[2] or match[1]
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> tuple[int, ...]:
    """``4(x2),3`` -> (4, 4, 3)."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise UserError(f"task counts {text!r} cannot be read at {item!r}: expected a list such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
