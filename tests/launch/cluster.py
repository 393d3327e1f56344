"""A real Slurm of four virtual nodes on this machine, and real MPIs, for tests that run jobs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "local_slurm.sh"
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def missing_programs(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if shutil.which(name, path=PATH) is None]


def wait_until(condition: Callable[[], object], timeout_s: float = 200.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:g} s in vain"
        time.sleep(0.05)


@dataclass(frozen=True)
class Cluster:
    """``env``: what clients need. ``dir``: the daemons' state and logs."""

    env: dict[str, str]
    dir: Path

    def run(
        self, *argv: str | Path, timeout_s: float = 400.0, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        words, env = [str(a) for a in argv], self.env | env
        return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)

    def sbatch(self, *argv: str | Path, cwd: Path | None = None, **env: str) -> str:
        """Submits; returns the job's id."""
        done = self.run("sbatch", "--parsable", *argv, cwd=cwd, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED, FAILED, ..."""
        fields = self.run("scontrol", "-o", "show", "job", job).stdout.split()
        return next((f.removeprefix("JobState=") for f in fields if f.startswith("JobState=")), "GONE")

    def wait(self, job: str, timeout_s: float = 400.0) -> str:
        """Waits for the job's end; returns its final state."""
        going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SIGNALING", "STAGE_OUT", "RESIZING")
        wait_until(lambda: self.state(job) not in going, timeout_s)
        return self.state(job)

    def control(self, *argv: str) -> None:
        """local_slurm.sh: fail NODE, restore NODE, ..."""
        subprocess.run(["bash", str(SCRIPT), *argv], env=self.env, check=True, capture_output=True, timeout=60)


def _free_port(count: int) -> int:
    """First of ``count`` free consecutive ports, above those that jobs take and below the ephemeral ones.

    Each worker of pytest-xdist looks in another range: two clusters may come up at the same time.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for base in range(31100 + 200 * worker, 31300 + 200 * worker, count):
        try:
            for port in range(base, base + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    raise AssertionError("no free ports for Slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """`local_cluster`; skips, saying why, where Slurm is not installed."""
    if missing := missing_programs(SLURM_PROGRAMS):
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge libpmix2)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    with local_cluster() as here:
        yield here


@contextlib.contextmanager
def local_cluster() -> Iterator[Cluster]:
    """Four nodes of 64 declared CPUs and one declared GPU, so that jobs have one rank a node."""
    state = Path(tempfile.mkdtemp(prefix="hs", dir="/tmp"))  # short: it holds unix sockets
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_XDIST"))}
    env |= {"HPCRL_SLURM_DIR": str(state / "s"), "HPCRL_SLURM_PORT": str(_free_port(8)), "PATH": PATH}
    env |= {"SLURM_CONF": f"{state}/s/etc/slurm.conf", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= mpi_env() | {"HPCRL_SLURM_GPUS": "1"}
    here = Cluster(env, state / "s")
    # Reads until this process ends, however it does: daemons must not outlive a killed test run.
    down = 'read -r _; bash "$0" down; rm -rf "$1"'
    guard = subprocess.Popen(
        ["bash", "-c", down, SCRIPT, state], env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        here.control("up", "4")
        yield here
    finally:
        guard.communicate(b"down\n", timeout=60)


def mpi_env() -> dict[str, str]:
    """What OpenMPI wants to hear from root."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return root | {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # more ranks than cores, too


def mpich_env(directory: Path) -> dict[str, str]:
    """Debian's MPICH library under the name that mpi4py's wheel (and every other MPICH) uses."""
    found = next(iter(Path("/usr/lib").glob("*/libmpich.so.12")), None)
    if found is None:
        return {}
    link = directory / "libmpi.so.12"
    if not link.exists():
        link.symlink_to(found)
    return {"LD_LIBRARY_PATH": str(directory)}


PYTHON = sys.executable
