"""Parallel HDF5 into one shared file, where an h5py with MPI is installed; a clear error where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
import torch

from hpc_rl.config import CheckpointConfig, StorageConfig
from hpc_rl.errors import UserError
from hpc_rl.storage.access import read_tensor
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.verify import verify
from tests.ranks import free_port
from tests.storage.mpio_ranks import SPECS, value

PYTHON = "/usr/bin/python3"  # Debian's python3-h5py-mpi, python3-mpi4py and python3-xxhash
ROOT = Path(__file__).parents[2]


def mpirun(num_ranks: int, *args: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(num_ranks), PYTHON, *args]
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{path}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HOME": "/tmp",
        "OMPI_MCA_btl_base_warn_component_unused": "0",
    }
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def has_mpi_h5py() -> bool:
    if shutil.which("mpirun") is None or not Path(PYTHON).exists():
        return False
    check = "import xxhash, mpi4py, h5py; raise SystemExit(not h5py.get_config().mpi)"
    return mpirun(1, "-c", check).returncode == 0


@pytest.mark.mpi
def test_all_ranks_write_one_file(tmp_path: Path) -> None:
    if not has_mpi_h5py():
        pytest.skip("no MPI-enabled h5py: apt-get install python3-h5py-mpi python3-mpi4py python3-xxhash openmpi-bin")
    done = mpirun(4, "-m", "tests.storage.mpio_ranks", str(tmp_path))
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "checkpoints" / "checkpoint_3_complete"
    assert sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*.*")) == [
        "digests.bin", "index.h5", "manifest.json", "shards/shared.h5",
    ]  # fmt: skip
    assert verify(checkpoint) == []
    for name, spec in SPECS.items():
        assert read_tensor(tmp_path, name, raw=True).tobytes() == value(name).tobytes()
        with h5py.File(checkpoint / "index.h5", "r") as file:
            assert file[name].shape == (spec.shape or (1,))


# What torch and the configuration import, beside the packages that Debian's Python has of its own.
BORROWED = (
    "torch", "torchgen", "functorch", "filelock", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec",
    "typing_extensions.py", "pydantic", "pydantic_core", "annotated_types", "typing_inspection",
)  # fmt: skip


@pytest.mark.mpi
def test_the_checkpointer_with_torch_and_mpi_in_one_process(tmp_path: Path) -> None:
    if not has_mpi_h5py():
        pytest.skip("no MPI-enabled h5py: apt-get install python3-h5py-mpi python3-mpi4py python3-xxhash openmpi-bin")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if mpirun(1, "-c", f"import sys; raise SystemExit(not sys.version.startswith('{version}.'))").returncode:
        pytest.skip(f"{PYTHON} is not Python {version}, so it cannot import this environment's torch")
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in BORROWED:
        (packages / name).symlink_to(Path(torch.__file__).parents[1] / name)
    done = mpirun(4, "-m", "tests.storage.mpio_checkpointer", str(tmp_path), str(free_port()), path=packages)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert [path.name for path in (checkpoint / "shards").iterdir()] == ["shared.h5"]
    assert verify(checkpoint) == []


def test_without_mpi_it_is_refused_at_the_start(tmp_path: Path) -> None:
    if h5py.get_config().mpi:
        pytest.skip("this h5py has MPI")
    with pytest.raises(
        UserError, match=r"driver = mpio: this h5py .* is built without MPI: .*set storage.driver=posix"
    ):
        Checkpointer(tmp_path, CheckpointConfig(), storage=StorageConfig(driver="mpio"))
