import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """A directory in memory where there is one: for many small saves whose syncs would wait for a busy disk."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="hpc_rl_test_", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)
