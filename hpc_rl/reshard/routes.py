"""Boxes on their way: links between two pieces, routes between two ranks, and which holder sends what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from hpc_rl.reshard.cells import Box
from hpc_rl.tensors.dtypes import ITEM_BYTES
from hpc_rl.tensors.shardmap import Piece, crop

MAX_PARTS = 16  # into which the boxes that one rank needs from a set of equal sources are dealt
SMALL_BYTES = 1 << 20  # less than this does not make a new pair of ranks talk, where an old one will do


class Dtypes(NamedTuple):
    """Of a tensor at the source, as it travels, and at the target."""

    source: str
    wire: str
    target: str


class Link(NamedTuple):
    """One box of a canonical tensor: where it lies at the source and at the target."""

    source: Piece
    target: Piece
    dtypes: Dtypes

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def nbytes(self) -> int:
        return self.source.numel * ITEM_BYTES[self.dtypes.wire]


class Route(NamedTuple):
    """Boxes that ``source`` sends to ``target``, both ranks, in this order."""

    source: int
    target: int
    links: tuple[Link, ...]
    nbytes: int


Need = tuple[Piece, Box, dict[int, Piece], Dtypes]  # target piece, box of it, source map -> its piece


class Bundle(NamedTuple):
    """Boxes of one target map that the same source maps hold."""

    groups: tuple[int, ...]  # source maps
    cells: list[Need]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each box."""
        return [prod(box[1]) * ITEM_BYTES[dtypes.wire] for _, box, _, dtypes in self.cells]


def links_of(cells: Iterable[Need], group: int) -> list[Link]:
    return [Link(_cut(sources[group], box), _cut(target, box), dtypes) for target, box, sources, dtypes in cells]


def _cut(piece: Piece, box: Box) -> Piece:
    return piece if (piece.start, piece.shape) == box else crop(piece, *box)


class Router:
    """Deals what each rank lacks over the ranks that hold it, to the least busy one first."""

    def __init__(self, source_of: list[int], target_of: list[int], node_size: int) -> None:
        self.source_of, self.target_of, self.node_size = source_of, target_of, node_size
        self.ranks_of: dict[int, list[int]] = defaultdict(list)
        for rank, group in enumerate(source_of):
            self.ranks_of[group].append(rank)
        self.load = ([0] * len(source_of), [0] * len(source_of))  # bytes sent within the node, and out of it
        self.peers: list[set[int]] = [set() for _ in source_of]  # of each target

    def routes(self, bundles: list[list[Bundle]]) -> list[Route]:
        """All routes. Large bundles first: small ones then follow the pairs that exist."""
        targets: dict[int, list[int]] = defaultdict(list)
        for rank, group in enumerate(self.target_of):
            targets[group].append(rank)
        todo = [(group, bundle, sum(bundle.sizes)) for group, some in enumerate(bundles) for bundle in some]
        out: list[Route] = []
        for group, bundle, _ in sorted(todo, key=lambda item: -item[2]):
            needy = [r for r in targets[group] if self.source_of[r] not in bundle.groups]
            if needy:
                out += self._deal(bundle, needy)
        return out

    def _deal(self, bundle: Bundle, needy: list[int]) -> list[Route]:
        holders = sorted(r for g in bundle.groups for r in self.ranks_of[g])
        by_node: dict[int, list[int]] = defaultdict(list)
        for r in holders:
            by_node[r // self.node_size].append(r)
        links: dict[tuple[int, int], tuple[Link, ...]] = {}
        out = []
        parts = _parts(bundle, min(MAX_PARTS, -(-4 * len(holders) // len(needy))))
        for target in needy:
            near = by_node.get(target // self.node_size)
            for number, (cells, nbytes) in enumerate(parts):
                source = self._pick(near or holders, target, nbytes, self.load[0 if near else 1])
                key = (number, self.source_of[source])
                if key not in links:
                    links[key] = tuple(links_of(cells, key[1]))
                out.append(Route(source, target, links[key], nbytes))
        return out

    def _pick(self, holders: list[int], target: int, nbytes: int, load: list[int]) -> int:
        known = [r for r in holders if r in self.peers[target]] if nbytes < SMALL_BYTES else []
        source = min(known or holders, key=lambda r: (load[r], (r - target) % len(load)))
        load[source] += nbytes
        self.peers[target].add(source)
        return source


def _parts(bundle: Bundle, num_parts: int) -> list[tuple[list[Need], int]]:
    """The boxes in at most ``num_parts`` runs of about equal bytes, with each run's bytes."""
    sizes = bundle.sizes
    if sum(sizes) < SMALL_BYTES:
        return [(bundle.cells, sum(sizes))]
    total, goal, begin, run = sum(sizes), 1, 0, 0
    out: list[tuple[list[Need], int]] = []
    for i, size in enumerate(sizes):
        run += size
        if run * num_parts >= goal * total or i == len(sizes) - 1:
            out.append((bundle.cells[begin : i + 1], sum(sizes[begin : i + 1])))
            begin, goal = i + 1, run * num_parts // total + 1
    return out
