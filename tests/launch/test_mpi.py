"""mpirun of OpenMPI and of MPICH, on this machine: one world, or a clear refusal."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.cluster import PYTHON, ROOT, missing_programs, mpi_env, mpich_env

pytestmark = pytest.mark.mpi
HELLO = ROOT / "tests/launch/hello.py"
FLAVOURS = ("openmpi", "mpich")


def mpirun(kind: str, nproc: int, out: Path, *rest: str, **env: str) -> subprocess.CompletedProcess[str]:
    program = f"mpirun.{kind}"  # Debian's names, both at once
    if missing_programs((program,)):
        pytest.skip(f"not installed: {program} (apt-get install openmpi-bin mpich)")
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | mpi_env() | mpich_env(out)
    argv = [program, "-n", str(nproc), PYTHON, str(HELLO), str(out), *rest]
    return subprocess.run(argv, env=base | env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("kind", FLAVOURS)
def test_four_ranks_one_world(tmp_path: Path, kind: str) -> None:
    done = mpirun(kind, 4, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank_{n}.json").read_text()) for n in range(4)]
    seen = [(r["rank"], r["size"], r["local_rank"], r["local_world_size"], r["num_nodes"], r["sum"]) for r in ranks]
    assert seen == [(n, 4, n, 4, 1, 6.0) for n in range(4)]
    assert {r["launcher"] for r in ranks} == {kind}
    assert len({r["master_port"] for r in ranks}) == 1


@pytest.mark.parametrize("kind", FLAVOURS)
def test_wrong_mpi_library_is_refused(tmp_path: Path, kind: str) -> None:
    """The other MPI's library under this mpirun gives worlds of size 1: an error, not two runs."""
    other = FLAVOURS[1 - FLAVOURS.index(kind)]
    done = mpirun(kind, 2, tmp_path, MPI4PY_MPIABI=other)
    assert done.returncode == 2
    assert f"mpirun ({kind}) started 2 ranks" in done.stderr
    assert "2 runs instead of one" in done.stderr
    assert not list(tmp_path.glob("rank_*.json"))


def test_missing_mpi_library_is_named(tmp_path: Path) -> None:
    done = mpirun("mpich", 2, tmp_path, LD_LIBRARY_PATH="", MPI4PY_LIBMPI="")
    assert done.returncode == 2
    assert "its MPI does not load (libmpi.so.12" in done.stderr


@pytest.mark.parametrize("kind", FLAVOURS)
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_failing_rank_ends_all(tmp_path: Path, kind: str, how: str) -> None:
    """Without `finish`, so without MPI_Finalize, mpirun ends the ranks that would wait for ever."""
    begin = time.monotonic()
    done = mpirun(kind, 2, tmp_path, "--fail", "1", how)
    assert done.returncode != 0
    assert time.monotonic() - begin < 200  # the other ranks sleep for 600 s
