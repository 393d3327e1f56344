"""Moving rounds of messages between ranks: dense, or as sparse deltas behind a small header."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_rl.errors import RunError
from hpc_rl.fault.phase import beat
from hpc_rl.reshard.incremental import (
    DENSE,
    Snapshot,
    changes,
    decode,
    delta_bytes,
    encode,
    masked,
)
from hpc_rl.reshard.plan import Link
from hpc_rl.reshard.slots import Round, Slot


class _Flight:
    """Operations under way, each with what to say if it fails."""

    def __init__(self) -> None:
        self.ops: list[dist.P2POp] = []
        self.labels: list[str] = []
        self.works: list[dist.Work] = []

    def add(self, outgoing: bool, tensor: Tensor, peer: int, group: dist.ProcessGroup | None, label: str) -> None:
        where = dist.get_global_rank(group, peer) if group is not None else peer
        self.ops.append(dist.P2POp(dist.isend if outgoing else dist.irecv, tensor, where, group))
        self.labels.append(f"{label} {'to' if outgoing else 'from'} rank {peer}")


class Exchange:
    """The messages of one rank. Peers are ranks of ``group``."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._rank, self._group, self._timeout_s = rank, group, timeout_s
        self._nccl = dist.is_initialized() and dist.get_backend(group) == "nccl"
        self._events: list[tuple[torch.cuda.Event, str]] = []
        if self._nccl:  # the first operation of an NCCL group must involve all of its ranks
            dist.barrier(group)

    def run(
        self,
        rounds: Sequence[Round],
        meanwhile: Callable[[], None],
        delta: bool = False,
        snapshot: Snapshot | None = None,
        changed: Mapping[str, Tensor] | None = None,
    ) -> dict[str, int]:
        """Exchanges all rounds, two in flight, and does ``meanwhile`` while the first is. Returns counts."""
        stats: Counter[str] = Counter(
            bytes_sent=0, bytes_received=0, messages_dense=0, messages_sparse=0, messages_skipped=0
        )
        self._events.clear()
        flights: list[tuple[_Flight, list[tuple[Slot, int, Tensor | None]]]] = []
        headers = self._headers(rounds[0], snapshot, changed) if delta and rounds else None
        for number, r in enumerate(rounds):
            beat()
            flights.append(self._post(r, headers, stats))
            if number == 0:
                meanwhile()
            else:
                self._finish(*flights[number - 1])
            if delta and number + 1 < len(rounds):
                headers = self._headers(rounds[number + 1], snapshot, changed)
        if flights:
            self._finish(*flights[-1])
        else:
            meanwhile()
        self._await_events()
        return dict(stats)

    def digests(
        self, sent: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Sequence[Link]]]
    ) -> list[tuple[int, Tensor]]:
        """Sends each peer its digests; returns (peer, int64 digests on the CPU) of all that send to this rank."""
        device = torch.device("cuda") if self._nccl else torch.device("cpu")
        flight, out = _Flight(), []
        for peer, values in sent:
            flight.add(True, values.to(device), peer, self._group, "digests")
        for peer, links in receives:
            out.append((peer, torch.empty(len(links), dtype=torch.int64, device=device)))
            flight.add(False, out[-1][1], peer, self._group, "digests")
        self._start(flight)
        self._wait(flight, on_host=True)
        return [(peer, values.cpu()) for peer, values in out]

    def _await_events(self) -> None:
        # NCCL works only order streams; here the host waits for them, so that a lost rank is noticed and named.
        deadline = time.monotonic() + self._timeout_s
        for event, label in self._events:
            while not event.query():
                if time.monotonic() > deadline:
                    raise RunError(f"{label} did not finish within {self._timeout_s:g} s")
        self._events.clear()

    def _headers(
        self, r: Round, snapshot: Snapshot | None, changed: Mapping[str, Tensor] | None
    ) -> tuple[_Flight, list[tuple[Slot, int, Tensor | None]], dict[int, Tensor]]:
        # Packs a round and tells each peer how many elements of each message changed.
        encoded = [(slot, *_encode(slot, snapshot, changed)) for slot in r.sends]
        flight = _Flight()
        incoming: dict[int, Tensor] = {}
        for peer in dict.fromkeys(slot.peer for slot in r.sends):
            counts = [count for slot, count, _ in encoded if slot.peer == peer]
            device = r.sends[0].flat.device
            flight.add(True, torch.tensor(counts, dtype=torch.int64, device=device), peer, self._group, "header")
        for peer, number in Counter(slot.peer for slot in r.receives).items():
            incoming[peer] = torch.empty(number, dtype=torch.int64, device=r.receives[0].flat.device)
            flight.add(False, incoming[peer], peer, self._group, "header")
        self._start(flight)
        return flight, encoded, incoming

    def _post(
        self, r: Round, headers: tuple[_Flight, list, dict[int, Tensor]] | None, stats: Counter[str]
    ) -> tuple[_Flight, list[tuple[Slot, int, Tensor | None]]]:
        outgoing: list[tuple[Slot, int, Tensor | None]]
        if headers is None:
            for slot in r.sends:
                slot.pack()
            outgoing = [(slot, DENSE, None) for slot in r.sends]
            incoming = [(slot, DENSE) for slot in r.receives]
        else:
            self._wait(headers[0], on_host=True)
            outgoing = headers[1]
            counts = {peer: iter(values.tolist()) for peer, values in headers[2].items()}
            incoming = [(slot, next(counts[slot.peer])) for slot in r.receives]
        flight = _Flight()
        for slot, count, delta in outgoing:
            kind = "dense" if count == DENSE else "sparse" if count else "skipped"
            stats[f"messages_{kind}"] += 1
            self._add(flight, True, slot, slot.flat if count == DENSE else delta, stats)
        landing = []
        for slot, count in incoming:
            delta = None
            if count > 0:
                size = delta_bytes(count, slot.flat.numel(), slot.flat.element_size())
                delta = torch.empty(size, dtype=torch.uint8, device=slot.flat.device)
            self._add(flight, False, slot, slot.flat if count == DENSE else delta, stats)
            landing.append((slot, count, delta))
        self._start(flight)
        return flight, landing

    def _add(self, flight: _Flight, outgoing: bool, slot: Slot, data: Tensor | None, stats: Counter[str]) -> None:
        if data is None:
            return
        raw = data.view(torch.uint8)
        stats["bytes_sent" if outgoing else "bytes_received"] += raw.numel()
        label = slot.message.links[0].name
        more = len(slot.message.links) - 1
        flight.add(outgoing, raw, slot.peer, self._group, label + (f" and {more} more" if more else ""))

    def _finish(self, flight: _Flight, landing: list[tuple[Slot, int, Tensor | None]]) -> None:
        self._wait(flight)
        for slot, count, delta in landing:
            if count == DENSE:
                slot.unpack()
            elif delta is not None:
                slot.pack()
                decode(delta, count, slot.flat)
                slot.unpack()

    def _start(self, flight: _Flight) -> None:
        try:
            flight.works = dist.batch_isend_irecv(flight.ops) if flight.ops else []
        except Exception as error:
            raise RunError(f"one of {', '.join(flight.labels[:8])} could not start: {one_line(error)}") from error

    def _wait(self, flight: _Flight, on_host: bool = False) -> None:
        deadline = time.monotonic() + self._timeout_s
        labels = [", ".join(flight.labels[:3])] if self._nccl else flight.labels  # NCCL makes one work of them all
        for work, label in zip(flight.works, labels, strict=False):
            try:
                if self._nccl:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except Exception as error:
                raise RunError(f"{label} failed (time-out {self._timeout_s:g} s): {one_line(error)}") from error
        if self._nccl and flight.works:
            self._events.append((torch.cuda.Event(), labels[0]))
            self._events[-1][0].record()
            if on_host:
                self._await_events()


def one_line(error: Exception) -> str:
    """What an exception says, in one line without the place in torch's source."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] ", "", text)[:200]


def _encode(slot: Slot, snapshot: Snapshot | None, changed: Mapping[str, Tensor] | None) -> tuple[int, Tensor | None]:
    slot.pack()
    index = masked(changed, slot.pieces) if changed is not None else None
    if index is None and snapshot is not None:
        index = changes(slot.flat, snapshot.flat(slot.pieces, slot.flat.device))
    return (DENSE, None) if index is None else encode(slot.flat, index)
