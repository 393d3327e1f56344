"""The rank grid: which coordinates a rank has on each parallel axis. Pure arithmetic, no process group.

Ranks are numbered as megatron-core does by default, order "tp-cp-ep-dp-pp": for attention, embeddings and dense MLPs
``rank = tp + TP * (cp + CP * (dp + DP * pp))``; for experts ``rank = etp + ETP * (ep + EP * (edp + EDP * pp))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from hpc_rl.errors import UserError

DENSE_AXES = ("tp", "cp", "dp", "pp")  # fastest first
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, slots=True)
class Coords:
    """One rank's place on every axis. ``etp``, ``ep`` and ``edp`` count for experts only."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes over ``world_size`` ranks.

    Args:
        world_size: number of ranks.
        tp, pp, cp, ep: tensor, pipeline, context and expert axes.
        etp: tensor axis of experts; 0: the same as ``tp`` (megatron-core's default).
        vpp: model chunks per pipeline stage (interleaved schedule).
        dp: data axis; 0: what the others leave over.
        chunk_layers: layers of each of the ``pp * vpp`` chunks in model order; empty: as even as possible.

    Raises:
        UserError: if the sizes do not fit.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    dp: int = 0
    chunk_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for axis in ("world_size", "tp", "pp", "cp", "ep", "vpp"):
            if getattr(self, axis) < 1:
                raise UserError(f"{axis} is {getattr(self, axis)}, but must be at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise UserError(f"vpp is {self.vpp}, but interleaving needs pp > 1: set vpp to 1")
        object.__setattr__(self, "etp", self.etp or self.tp)
        object.__setattr__(self, "dp", self.dp or self._left_over())
        self._check_products()

    def _left_over(self) -> int:
        model = self.tp * self.pp * self.cp
        if self.world_size % model:
            raise UserError(
                f"tp*pp*cp = {self.tp}*{self.pp}*{self.cp} = {model} does not divide the world size "
                f"{self.world_size}: use {-(-self.world_size // model) * model} ranks or smaller axes"
            )
        return self.world_size // model

    def _check_products(self) -> None:
        model, world = self.tp * self.pp * self.cp, self.world_size
        if model * self.dp != world:
            fix = f"use {model * self.dp} ranks" if world % model else f"set dp to {world // model}"
            raise UserError(
                f"tp*pp*cp*dp = {self.tp}*{self.pp}*{self.cp}*{self.dp} = {model * self.dp}, "
                f"but world size is {world}: {fix}"
            )
        experts = self.etp * self.ep * self.pp
        if world % experts:
            raise UserError(
                f"etp*ep*pp = {self.etp}*{self.ep}*{self.pp} = {experts} does not divide the world size "
                f"{world}: lower ep or etp"
            )
        if self.chunk_layers and len(self.chunk_layers) != self.pp * self.vpp:
            raise UserError(f"chunk_layers has {len(self.chunk_layers)} entries, but pp*vpp = {self.pp * self.vpp}")

    @property
    def edp(self) -> int:
        """Data axis of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coords(self, rank: int) -> Coords:
        """The place of ``rank`` on every axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} is not in [0, {self.world_size})"
        tp, cp, dp, pp = _split(rank, (self.tp, self.cp, self.dp, self.pp))
        etp, ep, edp, _ = _split(rank, (self.etp, self.ep, self.edp, self.pp))
        return Coords(tp, cp, dp, pp, etp, ep, edp)

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these dense coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, *axes: str) -> list[list[int]]:
        """Groups of ranks that differ only along ``axes``, each in rank order; groups in rank order too.

        Axes are all dense (``tp``, ``cp``, ``dp``, ``pp``) or all of experts (``etp``, ``ep``, ``edp``, ``pp``).
        """
        names = EXPERT_AXES if any(a in ("etp", "ep", "edp") for a in axes) else DENSE_AXES
        assert set(axes) <= set(names), f"axes {axes} mix dense and expert axes"
        sizes = [int(getattr(self, name)) for name in names]
        steps = dict(zip(names, (prod(sizes[:i]) for i in range(len(sizes))), strict=True))

        def offsets(chosen: list[str]) -> list[int]:
            sides = (range(int(getattr(self, a))) for a in chosen)
            return sorted(sum(i * steps[a] for i, a in zip(index, chosen, strict=True)) for index in product(*sides))

        inside = offsets([a for a in names if a in axes])
        return [[base + i for i in inside] for base in offsets([a for a in names if a not in axes])]

    def layers_of(self, pp: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Global layer numbers held by stage ``pp``, one tuple for each of its ``vpp`` chunks.

        Chunk v of stage p is the (v * pp_size + p)'th of the model. Layers that do not divide evenly go to the middle
        chunks first, since the first also holds the embedding and the last the output layer.
        """
        counts = self.chunk_layers or _even(num_layers, self.pp * self.vpp)
        if sum(counts) != num_layers:
            raise UserError(
                f"chunk_layers = {list(counts)} adds up to {sum(counts)}, but the model has {num_layers} layers"
            )
        if min(counts) < 1:
            raise UserError(
                f"pp*vpp = {self.pp}*{self.vpp} needs as many layers, but the model has {num_layers}: lower pp"
            )
        chunks = range(pp, self.pp * self.vpp, self.pp)
        return tuple(tuple(range(sum(counts[:c]), sum(counts[: c + 1]))) for c in chunks)


def _even(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    order = [*range(1, num_chunks - 1), 0, num_chunks - 1][:num_chunks]
    extra = set(order[: num_layers % num_chunks])
    return tuple(num_layers // num_chunks + (c in extra) for c in range(num_chunks))


def _split(rank: int, sizes: tuple[int, ...]) -> list[int]:
    out = []
    for size in sizes:
        out.append(rank % size)
        rank //= size
    return out


def replica_of(rank: int, gen_tp: int, train_tp: int = 1) -> tuple[int, int]:
    """(replica, tensor-parallel rank) of ``rank`` in generation.

    A replica is ``gen_tp`` neighbouring ranks; where training cuts finer, every (train_tp / gen_tp)-th rank of a training
    TP group, so that each rank's generation shard holds its training shard: the rest of it alone has to move.

    Source: micro data-parallel groups of HybridFlow, arXiv 2409.19256, section 5.3.
    """
    if gen_tp >= train_tp or train_tp % gen_tp:
        return divmod(rank, gen_tp)
    micro_dp = train_tp // gen_tp
    group, place = divmod(rank, train_tp)
    return group * micro_dp + place % micro_dp, place // micro_dp


def generation_order(world_size: int, gen_tp: int, train_tp: int = 1) -> list[int]:
    """All ranks, replica by replica, by tensor-parallel rank within each: the inverse of `replica_of`."""
    order = [0] * world_size
    for rank in range(world_size):
        replica, place = replica_of(rank, gen_tp, train_tp)
        order[replica * gen_tp + place] = rank
    return order
