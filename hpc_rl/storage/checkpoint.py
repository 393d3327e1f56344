"""Checkpoints: saved by every rank without stopping the step for long, read back at any layout."""

from __future__ import annotations

import json
import logging
import socket
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from hpc_rl.config import CheckpointConfig, StorageConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.storage import manifest, mpio
from hpc_rl.storage.access import load_index
from hpc_rl.storage.files import Files
from hpc_rl.storage.finish import Finish, Whole, partial_name
from hpc_rl.storage.host_copy import COPY_THREADS, Sources, fill
from hpc_rl.storage.loading import layout_digest, newest, read_into
from hpc_rl.storage.lustre import stripe
from hpc_rl.storage.manifest import DamagedCheckpoint
from hpc_rl.storage.plan import Holding, holding, plan
from hpc_rl.storage.shards import Member, shard_files
from hpc_rl.storage.spool import Spool, first_error
from hpc_rl.storage.tensor_io import pack
from hpc_rl.storage.writer import Job
from hpc_rl.tensors.shardmap import ShardMap

__all__ = ["Checkpointer", "DamagedCheckpoint", "load_index"]
logger = logging.getLogger(__name__)
Components = Mapping[str, tuple[ShardMap, Mapping[str, Tensor]]]
FINISHER = 0  # the rank whose writer completes the checkpoint


class Checkpointer:
    """Saves to and loads from ``RUN/checkpoints``. All ranks call every method but `fence` and `close` alike."""

    def __init__(
        self, run_dir: str | Path, config: CheckpointConfig, *, rank: int = 0, world_size: int = 1,
        group: dist.ProcessGroup | None = None, storage: StorageConfig | None = None,
        files: Files | None = None, deadline_s: float = 1800.0,
    ) -> None:  # fmt: skip
        assert world_size == 1 or group is not None, "several ranks need a gloo process group"
        self.root = Path(run_dir).absolute() / "checkpoints"
        self.config, self.storage = config, storage or StorageConfig()
        self.rank, self.world_size, self.group = rank, world_size, group
        self.files, self.deadline_s = files or Files(), deadline_s
        self._spool: Spool | None = None
        self._whole: Whole | None = None
        self._layouts: list[str] = []
        self._shard_file: tuple[str, tuple[int, ...]] = ("", ())
        self._mpi = mpio.communicator() if self.storage.driver == "mpio" else None
        self._run = uuid.uuid4().hex[:8]  # of rank 0, from the first save on
        self._num_saves = 0
        self._writing: list[tuple[int, int]] = []  # (serial, step), oldest first: one, or two with a staging disk
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._filling: Future[None] | None = None
        self._unsent = False  # the plan, to the finishing writer

    def prepare(
        self, components: Components, per_rank: Mapping[str, bytes | np.ndarray[Any, Any]] | None = None
    ) -> None:
        """Does ahead what only the first save needs: plan, writer process, first touch of the host buffer."""
        self._plan(holding({name: m for name, (m, _) in components.items()}), len(pack(per_rank or {})))
        assert self._whole is not None
        spool = self._live_spool()
        spool.buffer.reserve(sum(region.nbytes for region in self._whole.members[self.rank].regions()), touch=True)

    def save(
        self, step: int, components: Components, extra: Mapping[str, Any],
        per_rank: Mapping[str, bytes | np.ndarray[Any, Any]] | None = None, metrics: Mapping[str, float] | None = None,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        """Saves all state as of ``step``; waits first for the save before it.

        Args:
            components: name -> (map, contiguous local tensors), of this rank.
            extra: JSON-able values, the same on all ranks. per_rank: this rank's own (RNG states).
            metrics: for `keep_best`.
            overlap: return while the state is still being copied to host memory; the caller must call `fence` before it
                changes, moves or frees any of the tensors. For phases that only read them, such as generation.

        Asynchronous by configuration: returns once the state is in host memory.
        Raises: RunError, on every rank, when this save (synchronous) or the one before it failed.
        """
        self.fence()
        self._make_room(1 if self.storage.stage_dir else 0)
        json.dumps(extra)  # a value that is not JSON-able is the caller's mistake: raise it here
        state = pack(per_rank or {})
        self._plan(holding({name: shard_map for name, (shard_map, _) in components.items()}), len(state))
        self._start(step, Sources(components), state, extra, metrics or {}, overlap)
        if not overlap:
            self.fence()
        if not self.config.asynchronous:
            self.wait()

    def _start(
        self, step: int, sources: Sources, state: bytes, extra: Mapping[str, Any], metrics: Mapping[str, float],
        overlap: bool,
    ) -> None:  # fmt: skip
        """Hands the job to the writer and begins to fill the host buffer."""
        assert self._whole is not None
        spool = self._live_spool()
        if self._writing:
            spool.wait_buffer(self._writing[-1][0])
        member = self._whole.members[self.rank]
        buffer = spool.buffer.reserve(sum(region.nbytes for region in member.regions()))
        job = self._job(step, extra, metrics)
        ready = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        if self._mpi is not None:
            fill(buffer, member, sources, state, lambda nbytes: None, ready)
            members, alignment_bytes = self._whole.members, self.storage.alignment_bytes
            data = buffer.numpy().data
            report = mpio.write_shared(self._mpi, job.partial, members, self.rank, data, alignment_bytes)
            job = replace(job, report=report)  # the writer only finishes the checkpoint
        spool.start(job, self._whole if self._unsent and self.rank == FINISHER else None)
        self._unsent = False
        self._writing.append((job.serial, step))
        self._num_saves += 1
        if self._mpi is None:
            progress = partial(spool.filled, job.serial)
            num_threads = 1 if overlap else COPY_THREADS  # the next phase has work for the other cores
            self._filling = self._threads.submit(fill, buffer, member, sources, state, progress, ready, num_threads)

    def fence(self) -> None:
        """Returns when the state of the last save is in host memory: from then on it may change. Not a collective."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()

    def poll(self) -> int | None:
        """The step whose checkpoint became whole since the last call, if any. Call it at every step's end.

        Raises: RunError, on every rank, when the write failed (with ``on_error: continue`` it only warns).
        """
        step = self._writing[0][1] if self._writing else None
        ended, error = self._settle(block=False)
        self._report(error, self.config.on_error)
        return step if ended and not error else None

    def wait(self) -> None:
        """Returns when the save in flight is whole on disk. Raises RunError, on every rank, when it failed."""
        while self._writing:
            self._report(self._settle(block=True)[1], "stop")

    def close(self) -> None:
        """Waits for this rank's part of the save in flight and ends the writer. A failing rank may call it alone.

        Raises: RunError when that save failed here, or on rank 0 anywhere.
        """
        errors = []
        if self._spool:
            self.fence()
            errors = [self._spool.outcome(serial, block=True)[1] for serial, _ in self._writing]
            self._spool.close()
        self._spool, self._writing = None, []
        self._report(next(filter(None, errors), None), "stop")

    def latest(self) -> Path | None:
        """The newest checkpoint with all its files, by its step; None if there is none at all.

        A damaged one is passed over with a warning that says why.
        Raises: UserError when there are some, but none is whole: that is no reason to start afresh.
        """
        return self._newest(None)

    def load_newest(
        self, components: Components, verify: bool = True
    ) -> tuple[Path, dict[str, Any], dict[str, Any] | None] | None:
        """Loads the newest checkpoint whose every wanted byte is as saved; see `latest` and `load`."""
        path = self._newest(None)
        while path is not None:
            try:
                return path, *self.load(path, components, verify)
            except DamagedCheckpoint as error:
                logger.warning("skipped a damaged checkpoint: %s", error)
                path = self._newest(path)
        return None

    def _newest(self, before: Path | None) -> Path | None:
        """Rank 0 looks, for all."""
        answer = self._gather(newest(self.root, before) if self.rank == FINISHER else None)[FINISHER]
        if isinstance(answer, UserError):
            raise answer
        return answer

    def load(
        self, path: str | Path, components: Components, verify: bool = True
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Fills the local tensors in place, whatever layout they were saved at.

        Returns: ``extra``, and this rank's own values, or None where any rank's layout differs from the saved one.
        Raises: UserError, on every rank: DamagedCheckpoint, or a checkpoint that does not fit the run.
        """
        result, error = None, None
        try:
            result = read_into(Path(path), components, self.rank, self.world_size, verify, self.storage.direct_io)
        except UserError as caught:
            error = caught
        outcomes = self._gather((error, result is not None and result[2]))
        for other, _ in outcomes:
            if other is not None:
                raise other
        assert result is not None
        return result[0], result[1] if all(same for _, same in outcomes) else None

    def _plan(self, held: Holding, state_bytes: int) -> None:
        """Makes the plan of all ranks at the first save, or when a layout changed."""
        if self.rank == FINISHER and self._num_saves == 0:
            with suppress(OSError):  # the writer will meet it too, and tell it to all ranks
                self.files.makedirs(self.root)
                stripe(self.root, self.storage.stripe_count, self.storage.alignment_bytes)
        layout = layout_digest(held)
        ranks = self._gather((layout, state_bytes, socket.gethostname(), self._run))
        self._run = ranks[FINISHER][3]
        layouts, sizes, hosts = [r[0] for r in ranks], [r[1] for r in ranks], [r[2] for r in ranks]
        if (whole := self._whole) and layouts == self._layouts and sizes == [m.state_bytes for m in whole.members]:
            return
        made = plan(self._gather(held))
        members = tuple(Member(r, extents, sizes[r]) for r, extents in enumerate(made.ranks))
        self._whole, self._layouts = Whole(made.specs, members, tuple(layouts)), layouts
        self._shard_file = shard_files(hosts, self.storage.files_per_node)[self.rank]
        self._unsent = True

    def _job(self, step: int, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> Job:
        assert self._whole is not None
        name, ranks = self._shard_file
        finish = Finish(
            extra, metrics, self.config.keep_last, self.config.keep_every, self.config.keep_best,
            self.storage.page_bytes, self.deadline_s,
        )  # fmt: skip
        return Job(
            serial=self._num_saves, step=step, rank=self.rank,
            partial=self.root / partial_name(step, self._run, self._num_saves),
            final=self.root / manifest.complete_name(step), file=name,
            members=tuple(self._whole.members[r] for r in ranks),
            alignment_bytes=self.storage.alignment_bytes, direct=self.storage.direct_io, files=self.files,
            stage=Path(self.storage.stage_dir) if self.storage.stage_dir else None,
            finish=finish if self.rank == FINISHER else None,
        )  # fmt: skip

    def _live_spool(self) -> Spool:
        """The writer; a new one where there is none, or where it died."""
        if self._spool is not None and self._spool.dead and not self._writing:
            self._spool.close()
            self._spool = None
        if self._spool is None:
            self._spool, self._unsent = Spool(), True
        return self._spool

    def _make_room(self, num_steps: int) -> None:
        """Waits until at most ``num_steps`` saves are being written."""
        while len(self._writing) > num_steps:
            self._report(self._settle(block=True)[1], self.config.on_error)

    def _settle(self, block: bool) -> tuple[bool, str | None]:
        """(ended on all ranks, first error) of the oldest save. All ranks get the same answer."""
        if block:
            self.fence()
        if not self._writing or self._spool is None:
            return True, None
        serial, spool = self._writing[0][0], self._spool
        states = self._gather(spool.outcome(serial, block and self.rank != FINISHER))
        error = first_error(states)
        if error:
            self.fence()
            if self.rank == FINISHER:
                spool.filled(serial, -1)  # its writer may be waiting for a shard that will never come
        if block or error:
            states = self._gather(spool.outcome(serial, block=True))
        ended = all(done for done, _ in states)
        if ended:
            self._writing.pop(0)
            if not self.config.asynchronous:
                spool.buffer.free()  # who does not save in the background gets the memory back
        return ended, error or first_error(states)

    def _report(self, error: str | None, on_error: str) -> None:
        if error and on_error == "stop":
            raise RunError(f"a checkpoint could not be written: {error}")
        if error:
            logger.warning("a checkpoint could not be written: %s", error)

    def _gather(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self.world_size == 1:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.group)
        return out
