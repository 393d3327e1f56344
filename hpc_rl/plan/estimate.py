"""Seconds of a step by phase: estimates from rooflines, for longest sequences. Not measurements.

A phase takes what the slowest of its resources needs: arithmetic at a share of the data sheet's peak, bytes at a share
of its bandwidths. The shares are those of H200s with a 1.4 B model (benchmarks/results): 49% of peak in training and in
scoring, 3 ms and 10.5 us a sequence of host time for each step of vLLM, 40% of a link. Decoding at 60% of the memory's
bandwidth is assumed.
"""

from __future__ import annotations

from typing import Any

from hpc_rl.plan.generation import Generation
from hpc_rl.plan.job import PlannedJob
from hpc_rl.plan.schedule import bubble, micro_batch_count
from hpc_rl.plan.static import static_bytes
from hpc_rl.tensors.canonical import ModelSpec

TRAIN_SHARE, FORWARD_SHARE, MEMORY_SHARE, LINK_SHARE = 0.49, 0.49, 0.60, 0.40
STEP_S, STEP_S_PER_SEQUENCE = 3e-3, 10.5e-6  # host time of one vLLM step
ALL_REDUCE_S = 20e-6  # latency of a small all-reduce inside a node


def forward_flops(spec: ModelSpec, tokens: float, context: float) -> float:
    """2 N a token for the matrices, 4 c heads head_dim a layer for attention over c tokens (half of them: causal)."""
    matrices = spec.num_params - (spec.vocab_size * spec.hidden_size)  # the embedding is a look-up
    return tokens * (2.0 * matrices + 2.0 * context * spec.num_layers * spec.num_heads * spec.head_dim)


def estimate(job: PlannedJob, generation: Generation, reshard_seconds: float) -> dict[str, Any] | None:
    """Seconds by phase, and tokens a second and GPU; None where the GPU's rates are not known."""
    if job.gpu.bf16_tflops is None or job.gpu.network_gb_s is None:
        return None
    tokens = job.num_sequences * job.longest
    seconds = {"generation": _generation_s(job, generation)} if job.has_rollouts else {}
    if job.scored:
        seconds["scoring"] = sum(_pass_s(job, spec, 1.0, FORWARD_SHARE) for spec in job.scored.values())
    factor = 4.0 if job.config.parallel.recompute == "full" else 3.0
    for role, spec in job.trained.items():
        optimizer = _optimizer_s(job, role) * job.mini_batches
        seconds[f"{role} update"] = job.epochs * (_pass_s(job, spec, factor, TRAIN_SHARE) + optimizer)
    if job.has_rollouts:
        seconds["reshard"] = reshard_seconds / LINK_SHARE
    if job.config.parallel.offload and job.has_rollouts:
        held = max(sum(static_bytes(job, role, s).total for role in job.roles) for s in range(job.layout.pp))
        seconds["off-load and back"] = 2 * held / ((job.gpu.host_gb_s or 25) * 1e9)
    total = sum(seconds.values())
    return {name: round(value, 2) for name, value in seconds.items()} | {
        "step": round(total, 2),
        "tokens_per_s_per_gpu": round(tokens / total / job.layout.world_size, 1),
    }


def _pass_s(job: PlannedJob, spec: ModelSpec, factor: float, share: float) -> float:
    """All sequences of a step once through a model; ``factor``: its arithmetic over that of a forward pass."""
    gpu, layout = job.gpu, job.layout
    assert gpu.bf16_tflops is not None and gpu.link_gb_s is not None
    tokens = job.num_sequences * job.longest
    flops_per_s = gpu.bf16_tflops * 1e12 * share * layout.world_size
    arithmetic = factor * forward_flops(spec, tokens, job.longest) / flops_per_s
    # A layer gathers its tokens twice and reduces them twice, and its backward does the same.
    moved = 4 * job.item_bytes * spec.hidden_size * (layout.tp - 1) / layout.tp
    layers = spec.num_layers / layout.pp
    communication = factor * tokens / layout.dp * layers * moved / (gpu.link_gb_s * 1e9 * LINK_SHARE) / 2
    waiting = bubble(layout.pp, micro_batch_count(job))
    # FSDP2 gathers and reduces layers while others compute: the longer of the two counts.
    return max((arithmetic + communication) / (1 - waiting), _gathers_s(job, spec, trains=factor > 1.0))


def _gathers_s(job: PlannedJob, spec: ModelSpec, trains: bool) -> float:
    """FSDP2's traffic of one pass: weights gathered for each micro-batch (again for its backward), gradients summed."""
    gpu, ranks = job.gpu, job.layout.world_size
    if job.config.parallel.engine != "fsdp2":
        return 0.0
    assert gpu.link_gb_s is not None and gpu.network_gb_s is not None
    moved = spec.num_params * (ranks - 1) / ranks * ((2 * job.item_bytes + 4) if trains else job.item_bytes)
    link = gpu.link_gb_s if ranks <= job.gpus_per_node else gpu.network_gb_s
    return micro_batch_count(job) * job.mini_batches * moved / (link * 1e9 * LINK_SHARE)


def _optimizer_s(job: PlannedJob, role: str) -> float:
    """Gradients reduced over DP, AdamW on this rank's shard, weights gathered."""
    gpu, dp = job.gpu, job.layout.dp
    assert gpu.memory_gb_s is not None and gpu.network_gb_s is not None and gpu.link_gb_s is not None
    held = static_bytes(job, role, 0)
    if job.config.parallel.engine == "fsdp2":  # its traffic is a part of the passes
        return (2 * held.gradients + 2 * held.optimizer + held.weights) / (gpu.memory_gb_s * 1e9 * MEMORY_SHARE)
    link = gpu.link_gb_s if job.layout.tp * dp <= job.gpus_per_node else gpu.network_gb_s
    moved = (held.gradients + held.weights) * (dp - 1) / dp
    touched = 2 * held.gradients + 2 * held.optimizer + held.weights
    return moved / (link * 1e9 * LINK_SHARE) + touched / (gpu.memory_gb_s * 1e9 * MEMORY_SHARE)


def _generation_s(job: PlannedJob, generation: Generation) -> float:
    """Prefill, then one step per token for as many sequences at once as max_num_seqs and the KV cache allow."""
    gpu, spec, tp, rollout = job.gpu, job.model, job.generation_tp, job.config.rollout
    assert gpu.bf16_tflops is not None and gpu.memory_gb_s is not None
    sequences = -(-job.generated_sequences // job.num_replicas)
    at_once = max(1, min(rollout.max_num_seqs, sequences, generation.kv_tokens // job.longest))
    prompt, response = job.config.data.max_prompt_tokens, rollout.max_response_tokens
    peak = gpu.bf16_tflops * 1e12 * FORWARD_SHARE * tp
    prefill = forward_flops(spec, sequences * prompt, prompt) / peak
    context = prompt + response / 2
    read = generation.weights + at_once * context * generation.kv_bytes_per_token
    bandwidth = gpu.memory_gb_s * 1e9 * MEMORY_SHARE
    host = STEP_S + STEP_S_PER_SEQUENCE * at_once
    device = max(read / bandwidth, forward_flops(spec, at_once, context) / peak)
    device += 2 * spec.num_layers * ALL_REDUCE_S if tp > 1 else 0.0
    waves = -(-sequences // at_once)
    return prefill + waves * response * max(host, device)
