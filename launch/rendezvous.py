"""Where the ranks meet: rank 0 holds a bound, listening socket before anyone is told its port, and never lets go of it.

So there is no moment in which another program can take the port, and a rank that comes early waits in the kernel's
queue rather than in a sleep.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_listening: dict[int, int] = {}  # port -> file descriptor, until the store takes it over
_stores: list[TCPStore] = []  # keeps the servers alive


def listen(host: str, port: int) -> int:
    """Binds and listens on ``port`` (0: a free one) of ``host`` ("": all addresses); returns the port.

    Raises:
        UserError: the port is in use.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UserError(
            f"port {port} on {socket.gethostname()} cannot be used ({error.strerror}): another job may hold it; "
            "set MASTER_PORT to a free one"
        ) from None
    sock.listen(4096)
    port = sock.getsockname()[1]
    _listening[port] = sock.detach()
    return port


def adopt(port: int, fd: int) -> None:
    """Takes over a listening socket that the parent process made."""
    _listening[port] = fd


def host_store(port: int, timeout_s: float) -> int:
    """Serves the store of the job in this process (rank 0) on ``port`` (0: a free one); returns the port.

    ``init_process_group("...", init_method="env://")`` finds this server again by its port instead of making another.
    """
    from torch.distributed import TCPStore

    if port not in _listening:
        port = listen("", port)
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=_listening.pop(port),
    )
    _stores.append(store)
    return port
