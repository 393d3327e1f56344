"""The command line of mpirun, as a pure function."""

from __future__ import annotations

from launch.spec import LaunchSpec


def mpirun_argv(spec: LaunchSpec, kind: str) -> tuple[str, ...]:
    """mpirun for the whole job; the nodes come from the batch system that it finds itself in.

    Args:
        kind: openmpi or mpich (also its relatives with Hydra: Intel MPI, MVAPICH).
    """
    count = ("-n", str(spec.world_size))
    if kind == "openmpi":
        exports = [word for name in spec.env for word in ("-x", name)]
        place = ("--map-by", f"ppr:{spec.ranks_per_node}:node:oversubscribe", "--bind-to", "none")
        return ("mpirun", *count, *place, *exports, spec.python, *spec.program)
    exports = [word for name, value in spec.env.items() for word in ("-genv", name, value)]
    return ("mpirun", *count, "-ppn", str(spec.ranks_per_node), *exports, spec.python, *spec.program)
