"""Doing a plan: local copies, and bucketed, double-buffered point-to-point transfers straight into the targets."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_rl.errors import RunError, UserError
from hpc_rl.reshard.agreement import Agreement
from hpc_rl.reshard.digest import differing, digests
from hpc_rl.reshard.exchange import Exchange, one_line
from hpc_rl.reshard.incremental import Snapshot
from hpc_rl.reshard.messages import cut_for, local_copies, share_bytes
from hpc_rl.reshard.plan import Link, RankPlan
from hpc_rl.reshard.slots import LocalCopies, Round, bind_buckets, make_rounds, wire_of
from hpc_rl.tensors.shardmap import view

Work = tuple[LocalCopies, list[Round]]


class Resharder:
    """Keeps one rank's target tensors equal to the ranks' source tensors. All ranks make the same calls.

    Args:
        plan: this rank's part.
        sources, targets: local name -> contiguous tensor on one device, as the plan's pieces name them.
        group: of the plan's ranks; None: the default group, or no group if there is one rank.
        store: the job's key-value store; None: the default group's.
        bucket_bytes: staging space of one round; two are in flight.
        timeout_s: longest wait for another rank.
        verify: compare digests of targets and sources after each sync, after the first one (and the first after a failure), or
            never.
        snapshot: where to keep what was last sent, so that only changes travel; ``none``: all travels, every time.
        frozen: canonical names of tensors that never change: they travel in the first sync only.
        name: told apart from other resharders in the store.

    Raises:
        UserError: if the tensors are not those the plan speaks of, or the bucket is too small.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        *,
        group: dist.ProcessGroup | None = None,
        store: dist.Store | None = None,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 1800.0,
        verify: Literal["always", "first", "off"] = "first",
        snapshot: Literal["gpu", "host", "none"] = "none",
        frozen: Collection[str] = (),
        name: str = "reshard",
    ) -> None:
        self.version: int | None = None  # of the targets; None: unknown, so that the next sync is a full one
        self.plan, self._sources, self._targets = plan, sources, targets
        self._share = share_bytes(bucket_bytes, plan.max_peers)
        self._verify, self._frozen = verify, frozenset(frozen)
        self._snapshot, self._verified = (Snapshot(snapshot) if snapshot != "none" else None), False
        if error := misfit(plan, sources, targets):
            raise UserError(error)
        if store is None and plan.num_ranks > 1:
            store = dist.distributed_c10d._get_default_store()
        self._agreement = Agreement(store, name, plan.rank, plan.num_ranks, timeout_s)
        self._exchange = Exchange(plan.rank, group, timeout_s)
        self._works: dict[tuple[frozenset[str], bool], Work] = {}  # without which tensors, for a delta
        self._storages: tuple[int, ...] = ()
        self._buckets: list[Tensor] = []
        self._work(frozenset(), False)

    def sync(self, version: int, changed: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Makes the targets equal to the sources.

        Args:
            version: of the weights; the same on all ranks.
            changed: local source name -> bool mask of its shape, True where its bits on the wire may have changed since
                the last sync (a tensor without a mask may have changed anywhere). Given on all ranks or on none.

        Returns:
            Of this rank: ``bytes_local``, ``bytes_sent``, ``bytes_received``, ``bytes_lower_bound`` (of a full sync),
            ``messages_dense``, ``messages_sparse``, ``messages_skipped``, ``seconds``, ``seconds_verify``.

        Raises:
            RunError: on every rank, naming the rank and the tensor where it began. The targets are then undefined until
                the next sync, which is a full one; after a time-out gloo has closed the connection, and only a new job helps.
        """
        begin = time.perf_counter()
        delta = self.version is not None and (self._snapshot is not None or changed is not None)
        self._agreement.meet(f"{version}, {'delta' if delta else 'dense'}", "version")
        first, self.version = self.version is None, None
        with self._all_fail_together(f"sync of version {version}"):
            copies, rounds = self._work(frozenset() if first else self._frozen, delta)
            metrics = self._exchange.run(rounds, copies.run, delta, self._snapshot, changed)
            self._take_snapshot()
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        seconds, seconds_verify = time.perf_counter() - begin, 0.0
        if self._verify == "always" or (self._verify == "first" and not self._verified):
            seconds_verify = self.verify()
        self._agreement.meet(str(version), "version")
        self.version = version
        metrics |= {"bytes_local": copies.nbytes, "bytes_lower_bound": self.plan.lower_bound_bytes}
        return metrics | {"seconds": seconds, "seconds_verify": seconds_verify}

    def verify(self) -> float:
        """Compares every box of the targets with its source, bit by bit or by digest. Returns the seconds it took.

        Raises:
            RunError: on every rank, naming the first rank and tensor that differ.
        """
        begin = time.perf_counter()
        with self._all_fail_together("verification"):
            local = self.plan.local
            wrong = differing([(self._view(x, True), self._view(x, False), wire_of(x)) for x in local])
            problems = _problems(wrong, local, self.plan.rank)
            sent = [(peer, self._digests(links, True)) for peer, links in self.plan.sends]
            receives = dict(self.plan.receives)
            for peer, theirs in self._exchange.digests(sent, self.plan.receives):
                ours = self._digests(receives[peer], False)
                problems += _problems((theirs != ours).nonzero().view(-1).tolist(), receives[peer], peer)
            if problems:  # only now, when no other rank waits for digests
                raise RunError(problems[0])
        self._agreement.meet("compared", "state")
        self._verified = True
        return time.perf_counter() - begin

    def invalidate(self) -> None:
        """The targets were lost or changed (sleep level 2, a reload): the next sync is a full one. On all ranks."""
        self.version = None

    def forget_views(self) -> None:
        """Lets go of all tensor memory but the snapshot; the next sync takes it up again."""
        self._works.clear()
        self._buckets = []

    def _work(self, without: frozenset[str], delta: bool) -> Work:
        # Views stay right as long as each tensor keeps its storage; an engine that swaps it gets new views.
        tensors = (*self._sources.values(), *self._targets.values())
        storages = tuple(int(x) for t in tensors for x in (t.untyped_storage()._cdata, t.storage_offset()))
        if storages != self._storages:
            self._works.clear()
            self._storages = storages
        if (without, delta) not in self._works:
            self._works[without, delta] = self._build(without, delta)
            size = max((r.staging_bytes for _, rounds in self._works.values() for r in rounds), default=0)
            if size and (not self._buckets or self._buckets[0].numel() < size):
                self._buckets = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
            for _, rounds in self._works.values():
                bind_buckets(rounds, self._buckets)
        return self._works[without, delta]

    def _build(self, without: frozenset[str], delta: bool) -> Work:
        plan = self.plan
        sources = {k: t.detach() for k, t in self._sources.items()}
        targets = {k: t.detach() for k, t in self._targets.items()}
        sends, receives = (
            [(peer, [x for x in links if x.name not in without]) for peer, links in pairs]
            for pairs in (plan.sends, plan.receives)
        )
        rounds = make_rounds(sends, receives, cut_for(self._device.type, delta, self._share), sources, targets)
        copies = local_copies([x for x in plan.local if x.name not in without])
        return LocalCopies(copies, sources, targets), rounds

    @property
    def _device(self) -> torch.device:
        return next(iter((*self._targets.values(), *self._sources.values()))).device

    def _take_snapshot(self) -> None:
        if self._snapshot is not None:
            wires = {x.source.local: wire_of(x) for _, links in self.plan.sends for x in links}
            self._snapshot.take({k: t.detach() for k, t in self._sources.items()}, wires)

    def _view(self, link: Link, source: bool) -> Tensor:
        piece, tensors = (link.source, self._sources) if source else (link.target, self._targets)
        out: Tensor = view(piece, tensors[piece.local].detach())
        return out

    def _digests(self, links: tuple[Link, ...], source: bool) -> Tensor:
        out = torch.zeros(len(links), dtype=torch.int64)
        for wire in {wire_of(x) for x in links}:
            where = [i for i, x in enumerate(links) if wire_of(x) == wire]
            out[where] = digests([self._view(links[i], source) for i in where], wire)
        return out

    @contextmanager
    def _all_fail_together(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.version = None
            text = one_line(error) if isinstance(error, RunError) else f"{type(error).__name__}: {one_line(error)}"
            self._verified = False
            self._agreement.fail_next(f"rank {self.plan.rank}: {what}: {text}")


def _problems(wrong: list[int], links: Sequence[Link], source: int) -> list[str]:
    if not wrong:
        return []
    link = links[wrong[0]]
    return [
        f"{link.name} in {link.target.local} differs from {link.source.local} of rank {source} "
        f"({len(wrong)} of {len(links)} boxes differ)"
    ]


def misfit(plan: RankPlan, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> str:
    """Names the first box of ``plan`` whose local tensor is not there or does not hold it; "" if all are well."""
    sends, receives = [x for _, some in plan.sends for x in some], [x for _, some in plan.receives for x in some]
    for links, tensors, what in (((*plan.local, *sends), sources, "source"), ((*plan.local, *receives), targets, "target")):
        for link in links:
            piece, dtype = getattr(link, what), getattr(link.dtypes, what)
            tensor = tensors.get(piece.local)
            if tensor is None:
                return f"{piece.name} should be in the {what} tensor {piece.local}, which rank {plan.rank} lacks"
            last = piece.offset + sum((n - 1) * k for n, k in zip(piece.shape, piece.strides, strict=True))
            if last >= tensor.numel() or not tensor.is_contiguous() or tensor.dtype != getattr(torch, dtype):
                return (
                    f"rank {plan.rank}: {piece.name} of shape {list(piece.shape)} does not fit the {what} tensor "
                    f"{piece.local}, which is {tensor.dtype} {list(tensor.shape)}, not a contiguous {dtype} tensor of over "
                    f"{last} elements"
                )
    return ""
