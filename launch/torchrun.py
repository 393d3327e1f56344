"""The command line of torchrun, as a pure function."""

from __future__ import annotations

from launch.spec import LaunchSpec


def torchrun_argv(spec: LaunchSpec, endpoint: str = "localhost:0", run_id: str = "hpc_rl") -> tuple[str, ...]:
    """torchrun for the ranks of one node, the same on each node of the job.

    Args:
        endpoint: HOST:PORT of the first node; port 0 (one node only): a free one.
        run_id: the same on all nodes, different for each job.
    """
    return (
        spec.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={spec.num_nodes}",
        f"--nproc-per-node={spec.ranks_per_node}",
        "--max-restarts=0",  # a restart is the supervisor's decision: it needs the whole job and a checkpoint
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"--log-dir={spec.log_dir}",
        "--tee=3",
        "--local-ranks-filter=0",
        *spec.program,
    )
