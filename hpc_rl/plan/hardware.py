"""What a GPU and a cluster's links can do, from the vendors' data sheets.

A GB of memory is 2^30 bytes, as in a GPU's name; rates count 10^9 bytes.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace

from hpc_rl.errors import UserError

GB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Rates are None where only its memory is known, memory None where there is no limit.

    Args:
        memory_gb: as torch reports it (less than the name says).
        bf16_tflops: dense. memory_gb_s: of its memory.
        link_gb_s: to the GPUs of its node, each way. network_gb_s: its share of the node's network, each way: an
            assumption about the cluster (one adapter per GPU, of 400 Gb/s for Hopper and Blackwell, 200 before).
        host_gb_s: pinned copies to and from the host.
    """

    name: str
    memory_gb: float | None
    bf16_tflops: float | None = None
    memory_gb_s: float | None = None
    link_gb_s: float | None = None
    network_gb_s: float | None = None
    host_gb_s: float | None = None


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 79.2, 312, 2039, 300, 25, 25),
        Gpu("a100-40", 39.4, 312, 1555, 300, 25, 25),
        Gpu("h100", 79.2, 989, 3350, 450, 50, 55),
        Gpu("h200", 139.8, 989, 4800, 450, 50, 55),
        Gpu("gh200", 94.5, 989, 4000, 450, 50, 350),
        Gpu("b200", 178.3, 2250, 7700, 900, 50, 55),
        Gpu("l40s", 44.4, 362, 864, 32, 25, 25),
    )
}
CPU = Gpu("cpu", None)
DEFAULT_GPU = "h100"


def find_gpu(name: str | None, memory_gb: float | None, device: str) -> Gpu:
    """The GPU to plan for.

    Args:
        name: of the table; None: one that only has ``memory_gb``, or h100 where that is None too.
        memory_gb: instead of the table's.
        device: ``launch.device``: for "cpu" without a name, host memory per rank is planned.

    Raises:
        UserError: unknown name, or no memory.
    """
    if memory_gb is not None and not 0 < memory_gb < 1e6:
        raise UserError(f"--gpu-memory-gb = {memory_gb:g}: must be a positive number of GB, for example 80")
    if name is None and device == "cpu":
        return replace(CPU, memory_gb=memory_gb)
    if name is None and memory_gb is not None:
        return Gpu(f"a GPU of {memory_gb:g} GB", memory_gb)
    gpu = GPUS.get((name or DEFAULT_GPU).lower())
    if gpu is None:
        raise UserError(f"--gpu = {name}: is not in the table: use one of {', '.join(GPUS)}, or give --gpu-memory-gb")
    return gpu if memory_gb is None else replace(gpu, memory_gb=memory_gb)


def gpu_here(device: str) -> Gpu:
    """The GPUs of this node by nvidia-smi, which needs no CUDA context; CPU with ``launch.device=cpu`` or without any."""
    if device == "cpu":
        return CPU
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return CPU
    return gpu_named(*lines[0].rsplit(", ", 1)) if lines else CPU


def gpu_named(name: str, memory_mib: str) -> Gpu:
    """The table's row for what nvidia-smi says, with the smaller of both memories; rates unknown if there is none."""
    memory_gb = 0.995 * float(memory_mib) / 1024  # the driver keeps a little
    found = [gpu for key, gpu in GPUS.items() if key.partition("-")[0] in name.lower()]
    if not found:
        return Gpu(name, memory_gb)
    gpu = min(found, key=lambda g: abs((g.memory_gb or 0.0) - memory_gb))
    return replace(gpu, memory_gb=min(memory_gb, gpu.memory_gb or memory_gb))
