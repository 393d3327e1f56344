"""A lock of another host is taken only if its counter stands."""

import pytest

from hpc_rl.storage.lock import alive


@pytest.mark.parametrize("moves", [True, False])
def test_a_lock_of_another_host_is_live_while_its_counter_moves(moves: bool) -> None:
    owner = {"host": "another-host.invalid", "boot": "another boot", "pid": 1, "job_id": "7"}
    assert alive(owner, "8", flock_told=True, look=lambda: moves) is moves
