"""Checkpoints against the disk: every figure of one run, fsync included, rounds of all contestants interleaved.

`raw` is what the disk gives to plain sequential direct I/O in 32 MiB blocks, three in flight, from memory that is
there already: the limit of any checkpoint. Rates are medians over rounds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.checkpoint_index import measure as measure_index
from hpc_rl.config import CheckpointConfig
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.files import new_buffer
from hpc_rl.storage.tensor_io import digest
from hpc_rl.tensors.shardmap import ShardMap, TensorSpec, whole_piece

BLOCK, NUM_IN_FLIGHT = 32 << 20, 3
HIDDEN, FFN = 1024, 2816


def make_state(nbytes: int, device: str = "cpu") -> tuple[ShardMap, dict[str, Tensor]]:
    """Parameters in bfloat16 and three float32 optimizer tensors each, of a transformer of about ``nbytes``."""
    shapes = {f"{n}.weight": (HIDDEN, HIDDEN) for n in "qkvo"} | {f"{n}.weight": (FFN, HIDDEN) for n in ("gate", "up")}
    shapes |= {"down.weight": (HIDDEN, FFN), "norm.weight": (HIDDEN,)}
    per_layer = sum(torch.Size(s).numel() for s in shapes.values()) * 14
    tensors: dict[str, Tensor] = {}
    for layer in range(max(1, round(nbytes / per_layer))):
        for name, shape in shapes.items():
            tensors[f"param/layers.{layer}.{name}"] = torch.full(
                shape, layer + 0.5, dtype=torch.bfloat16, device=device
            )
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                tensors[f"{kind}/layers.{layer}.{name}"] = torch.full(shape, layer + 0.25, device=device)
    specs = {n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    return ShardMap(specs, tuple(whole_piece(n, tuple(t.shape), n) for n, t in tensors.items())), tensors


def seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


class Disk:
    """Raw sequential I/O of one file."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes // BLOCK * BLOCK
        self.block = new_buffer(NUM_IN_FLIGHT * BLOCK)
        self.block[:] = os.urandom(4096) * (NUM_IN_FLIGHT * BLOCK // 4096)

    def each_block(self, flags: int, call: Callable[[int, memoryview, int], int]) -> float:
        """Bytes per second."""
        begin = time.perf_counter()
        fd = os.open(self.path, flags | os.O_DIRECT, 0o644)
        parts = [self.block[i * BLOCK : (i + 1) * BLOCK] for i in range(NUM_IN_FLIGHT)]
        with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
            list(pool.map(lambda i: call(fd, parts[i % NUM_IN_FLIGHT], i * BLOCK), range(self.nbytes // BLOCK)))
        os.fsync(fd)
        os.close(fd)
        return self.nbytes / (time.perf_counter() - begin)

    def write(self) -> float:
        self.path.unlink(missing_ok=True)
        return self.each_block(os.O_WRONLY | os.O_CREAT, lambda fd, data, offset: os.pwrite(fd, data, offset))

    def read(self) -> float:
        return self.each_block(os.O_RDONLY, lambda fd, data, offset: os.preadv(fd, [data], offset))


def torch_save(state: dict[str, Tensor], path: Path) -> None:
    """torch.save, fsync included."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_save(state: dict[str, Tensor], path: Path) -> None:
    """torch.distributed.checkpoint with its file system writer, which fsyncs."""
    writer = dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=1)
    dcp.save(state, storage_writer=writer, no_dist=True)


def memory_bytes(*pids: int) -> int:
    """Proportional set size of some processes: shared pages count once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


class Contest:
    """All measurements on one state in one directory. Ratios are taken within a round and their median reported."""

    def __init__(self, root: Path, nbytes: int, device: str = "cpu") -> None:
        self.root, self.device = root, device
        self.shard_map, self.tensors = make_state(nbytes, device)
        self.nbytes = sum(t.nbytes for t in self.tensors.values())
        self.disk = Disk(root / "raw", self.nbytes)
        self.base_bytes = memory_bytes(os.getpid())
        self.saver = Checkpointer(root / "run", CheckpointConfig(keep_last=1))
        self.step = 0
        self.rows: dict[str, list[float]] = {}

    @property
    def components(self) -> dict[str, tuple[ShardMap, dict[str, Tensor]]]:
        return {"actor": (self.shard_map, self.tensors)}

    def add(self, name: str, value: float) -> float:
        self.rows.setdefault(name, []).append(value)
        return value

    def median(self, name: str) -> float:
        return statistics.median(self.rows[name])

    def save(self, overlap: bool = False) -> None:
        self.step += 1
        self.saver.save(self.step, self.components, {}, overlap=overlap)

    def warm_up(self) -> None:
        """The first save also starts the writer, touches the host buffer for the first time and builds the index."""
        self.add("first_save_s", seconds(lambda: (self.save(), self.saver.wait())))
        assert self.saver._spool is not None
        used = memory_bytes(os.getpid(), self.saver._spool.process.pid)
        self.add("extra_memory_fraction", (used - self.base_bytes) / self.nbytes)

    def save_round(self) -> None:
        """A save between two raw writes."""
        before = self.disk.write()
        start = time.perf_counter()
        self.save()
        self.add("stall_s", time.perf_counter() - start)
        self.saver.wait()
        save = self.nbytes / self.add("save_s", time.perf_counter() - start)
        raw = self.add("raw_write", (before + self.disk.write()) / 2)
        self.add("save_fraction", save / raw)
        self.add("stall_fraction", self.rows["stall_s"][-1] / self.rows["save_s"][-1])

    def load_round(self) -> None:
        """A load between two raw reads."""
        path = self.saver.latest()
        assert path is not None
        before = self.disk.read()
        load = self.nbytes / self.add("load_s", seconds(lambda: self.saver.load(path, self.components)))
        self.add("load_fraction", load / self.add("raw_read", (before + self.disk.read()) / 2))

    def overlapped(self, busy_s: float) -> None:
        """What a save costs a step whose next phase (here: matrix products, on one thread) only reads the state.

        The stall is the time in `save` and `fence`; the slow-down is what the phase itself takes longer beside the copy.
        """
        a = torch.ones(256, 256)

        def phase(count: int) -> None:
            for _ in range(count):
                a @ a

        count = max(1, int(64 * busy_s / seconds(lambda: phase(64))))
        before = seconds(lambda: phase(count))
        stall = seconds(lambda: self.save(overlap=True))
        beside = seconds(lambda: phase(count))
        self.add("overlapped_stall_s", stall + seconds(self.saver.fence))
        self.saver.wait()
        self.add("slow_down_s", max(0.0, beside - (before + seconds(lambda: phase(count))) / 2))

    def others(self) -> None:
        """torch.save and torch.distributed.checkpoint, each next to a save."""
        path = self.root / "other"
        ours = seconds(lambda: (self.save(), self.saver.wait()))
        theirs = self.add("torch_save_s", seconds(lambda: torch_save(self.tensors, path)))
        self.add("speedup_over_torch_save", theirs / ours)
        path.unlink()
        theirs = self.add("dcp_save_s", seconds(lambda: dcp_save(self.tensors, path)))
        self.add("speedup_over_dcp", theirs / ours)
        shutil.rmtree(path)

    def digest_cost(self) -> None:
        """Processor time of the digests; they are taken while the disk writes."""
        assert self.saver._spool is not None
        buffer = memoryview(self.saver._spool.buffer.tensor.numpy())
        blocks = range(0, self.nbytes, BLOCK)
        for _ in range(5):
            self.add("digest_s", seconds(lambda: [digest(buffer[i : i + BLOCK]) for i in blocks]))

    def pinned_copy(self) -> None:
        """One plain copy of as many bytes from the GPU to page-locked memory, next to a save's stall."""
        source = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        target = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        for _ in range(3):
            torch.cuda.synchronize()
            plain = seconds(lambda: (target.copy_(source, non_blocking=True), torch.cuda.synchronize()))
            stall = seconds(self.save)
            self.saver.wait()
            self.add("gpu_stall_over_pinned_copy", stall / plain)


def run(quick: bool = False, directory: Path | None = None) -> dict[str, Any]:
    """Measures in ``directory`` (default: here), which must be on the disk in question.

    Returns: bars (name, value, unit, goal, better) and a table of (what, value, unit).
    """
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=directory or Path.cwd()))
    try:
        contest = Contest(root, (1 << 30) if quick else (5 << 29))
        contest.warm_up()
        for i in range(5):
            contest.save_round()
            contest.load_round()
            if i < (3 if quick else 5):
                contest.overlapped(0.5)
            if i < (1 if quick else 3):
                contest.others()
        contest.digest_cost()
        contest.saver.close()
        bars, table = report(contest, measure_index())
        if torch.cuda.is_available():
            on_gpu = Contest(root / "gpu", (1 << 30) if quick else (16 << 30), "cuda")
            on_gpu.warm_up()
            on_gpu.pinned_copy()
            on_gpu.saver.close()
            value = on_gpu.median("gpu_stall_over_pinned_copy")
            bars.append(("gpu_stall_over_pinned_copy", value, "x", 1.2, "lower"))
    finally:
        shutil.rmtree(root)
    return {
        "bars": [dict(zip(("name", "value", "unit", "goal", "better"), bar, strict=True)) for bar in bars],
        "table": [dict(zip(("what", "value", "unit"), row, strict=True)) for row in table],
    }


Bar = tuple[str, float, str, float, str]
Row = tuple[str, float, str]


def report(contest: Contest, index: dict[str, float]) -> tuple[list[Bar], list[Row]]:
    """Bars (name, value, unit, goal, better) and table (what, value, unit)."""
    size, of = contest.nbytes, contest.median
    bars: list[Bar] = [
        ("save_fraction_of_disk", of("save_fraction"), "fraction", 0.85, "higher"),
        ("load_fraction_of_disk", of("load_fraction"), "fraction", 0.85, "higher"),
        ("save_speedup_over_torch_save", of("speedup_over_torch_save"), "x", 2.0, "higher"),
        ("save_speedup_over_dcp", of("speedup_over_dcp"), "x", 1.5, "higher"),
        ("async_stall_fraction", of("overlapped_stall_s") / of("save_s"), "fraction", 0.10, "lower"),
    ]
    table: list[Row] = [
        ("state", size / 1e9, "GB"),
        ("raw write", of("raw_write") / 1e9, "GB/s"),
        ("save", size / of("save_s") / 1e9, "GB/s"),
        ("raw read", of("raw_read") / 1e9, "GB/s"),
        ("load, digests checked", size / of("load_s") / 1e9, "GB/s"),
        ("torch.save", size / of("torch_save_s") / 1e9, "GB/s"),
        ("torch DCP", size / of("dcp_save_s") / 1e9, "GB/s"),
        ("first save (buffer touched, writer started)", of("first_save_s"), "s"),
        ("stall, copy before the next phase", of("stall_s"), "s"),
        ("stall, copy before the next phase / save", of("stall_fraction"), "fraction"),
        ("stall, copy during a phase that only reads", of("overlapped_stall_s"), "s"),
        ("slow-down of that phase beside copy and write", of("slow_down_s"), "s"),
        ("digest / write", of("digest_s") / of("save_s"), "fraction"),
        ("extra host memory / state", of("extra_memory_fraction"), "fraction"),
        ("70B on 512 ranks: plan", index["plan_s"], "s"),
        ("70B on 512 ranks: build index.h5", index["build_s"], "s"),
        ("70B on 512 ranks: open index.h5", index["open_s"], "s"),
        ("70B on 512 ranks: index.h5", index["bytes"] / 1e6, "MB"),
        ("70B on 512 ranks: most loaded rank / mean", index["imbalance"], "x"),
    ]
    return bars, table
