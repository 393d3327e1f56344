"""A start that would bring the machine down is refused."""

from __future__ import annotations

import os

import pytest

from hpc_rl.errors import UserError
from hpc_rl.run import RANKS_PER_CORE, check_local_ranks


def test_more_ranks_than_the_machine_can_run_are_refused() -> None:
    limit = RANKS_PER_CORE * (os.cpu_count() or 1)
    check_local_ranks(limit)
    with pytest.raises(UserError, match=rf"launch.nproc = {limit + 1}, but this machine .* at most {limit} ranks"):
        check_local_ranks(limit + 1)
