"""A job in small, for the launcher tests: joins, adds up the ranks, writes what it saw to DIR/rank_N.json.

    hello.py DIR [--fail RANK HOW]     HOW: raise, exit, kill, hang (ignores SIGTERM), child (leaves a process behind)
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_rl.errors import UserError
from launch import env


def fail(how: str, out: Path) -> None:
    if how == "raise":
        raise RuntimeError("boom")
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (out / "child.pid").write_text(str(child.pid))
        os._exit(7)
    time.sleep(600)


def main() -> None:
    out = Path(sys.argv[1])
    info = env.export_torch_env(env.detect(), timeout_s=60)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(info.rank))
    dist.all_reduce(total)
    seen = {**dataclasses.asdict(info), "sum": total.item(), "size": dist.get_world_size(), "pid": os.getpid()}
    (out / f"rank_{info.rank}.json").write_text(json.dumps(seen))
    print(f"hello from rank {info.rank}", flush=True)
    if "--fail" in sys.argv:
        rank, how = sys.argv[sys.argv.index("--fail") + 1 :][:2]
        dist.barrier()
        if how == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (out / f"ready_{info.rank}").touch()
        if int(rank) == info.rank:
            fail(how, out)
        time.sleep(600)
    dist.barrier()
    dist.destroy_process_group()
    env.finish(info)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"hello: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
