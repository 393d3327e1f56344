"""Bytes of a vLLM rank, and how many tokens its KV cache holds. What vLLM measures when it starts is estimated here."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.plan.hardware import GB
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.static import local_numels
from hpc_rl.tensors.vllm_map import vllm_shard_map

CPU_KV_CACHE_BYTES = 256 << 20  # at most, where no size is asked for: rollout/vllm_cpu.py's
CPU_BLOCK_TOKENS = 128  # vLLM's block on the CPU
RESIDUE_BYTES, EAGER_RESIDUE_BYTES = 1.0 * GB, 0.4 * GB  # CUDA graphs and buffers, also there while vLLM sleeps


@dataclass(frozen=True, slots=True)
class Generation:
    """Bytes on each rank while vLLM is awake. ``residue``: what sleep does not free.

    ``requested``: what vLLM wants to find free when it starts, whatever it then takes.
    """

    weights: int
    kv_cache: float
    activations: float
    residue: float
    requested: float
    kv_bytes_per_token: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of a replica holds."""
        return max(0, int(self.kv_cache / self.kv_bytes_per_token))


def generation_memory(job: PlannedJob) -> Generation:
    """What vLLM takes on a rank of ``job``; nothing where there are no rollouts.

    With ``rollout.kv_cache_bytes`` null the KV cache is what is left of ``gpu_memory_utilization`` after weights and
    the activations of a full batch.
    """
    if not job.has_rollouts:
        return Generation(0, 0.0, 0.0, 0.0, 0.0, 1)
    spec, tp, rollout = job.model, job.generation_tp, job.config.rollout
    weights = sum(local_numels(vllm_shard_map(spec, tp, 0, job.config.model.dtype)).values()) * job.item_bytes
    per_token = 2 * spec.num_layers * max(1, spec.num_kv_heads // tp) * spec.head_dim * job.item_bytes
    if job.on_cpu:
        block = rollout.block_size or CPU_BLOCK_TOKENS
        sequence = -(-job.longest // block) * block * per_token
        most = min(CPU_KV_CACHE_BYTES, rollout.max_num_seqs * sequence)
        kv = float(rollout.kv_cache_bytes or max(most, sequence + block * per_token))
        return Generation(weights, kv, _activation_bytes(job, 4096), 0.0, 0.0, per_token)
    residue = EAGER_RESIDUE_BYTES if rollout.enforce_eager else RESIDUE_BYTES
    activations = _activation_bytes(job, _batched_tokens(job))
    requested = rollout.gpu_memory_utilization * (job.gpu.memory_gb or 0.0) * GB
    kv = float(rollout.kv_cache_bytes or max(0.0, requested - weights - activations))
    return Generation(weights, kv, activations, residue, requested, per_token)


def _batched_tokens(job: PlannedJob) -> int:
    """vLLM's default max_num_batched_tokens for offline use."""
    large = (job.gpu.memory_gb or 0.0) >= 70 and not job.gpu.name.startswith("a100")
    return 16384 if large else 8192


def _activation_bytes(job: PlannedJob, tokens: int) -> float:
    """Of a full batch: two hidden states and the MLP; then float32 logits, their log-softmax and a copy."""
    spec, tp = job.model, job.generation_tp
    layer = job.item_bytes * tokens * (2 * spec.hidden_size + 3 * spec.intermediate_size / tp)
    logits = 12 * min(tokens, job.config.rollout.max_num_seqs) * spec.vocab_size
    return float(max(layer, logits))
