"""Micro-batches of an optimizer step, and how much of a pipeline's time its ranks wait."""

from __future__ import annotations

from functools import cache
from typing import Any

from hpc_rl.data.packing import micro_batches, partition
from hpc_rl.plan.job import PlannedJob


def _count(job: PlannedJob, num_sequences: int) -> int:
    """Micro-batches of each DP rank when that many sequences of full length are dealt as the engine deals them."""
    return _packed(job.longest, num_sequences, job.layout.dp, job.config.algorithm.micro_batch_tokens)


@cache  # `parallel: auto` asks for each layout again and again
def _packed(length: int, num_sequences: int, dp: int, token_budget: int) -> int:
    lengths = [length] * num_sequences
    return len(micro_batches(lengths, partition(lengths, dp), token_budget)[0])


def micro_batch_count(job: PlannedJob) -> int:
    """Micro-batches of the largest optimizer step on each DP rank, with sequences of full length."""
    return _count(job, job.mini_batch_sequences)


def bubble(pp: int, num_micro_batches: int) -> float:
    """Part of a pipelined pass in which a rank waits: (pp - 1) / (m + pp - 1), for 1F1B and for forward alone.

    Source: arXiv 2104.04473, section 2.2.
    """
    return (pp - 1) / (num_micro_batches + pp - 1)


def schedule_report(job: PlannedJob) -> dict[str, Any]:
    """Counts for the longest sequences; shorter ones need fewer micro-batches."""
    update, scoring = micro_batch_count(job), _count(job, job.num_sequences)
    out = {
        "sequences_per_step": job.num_sequences,
        "optimizer_steps_per_step": job.epochs * job.mini_batches,
        "sequences_per_optimizer_step": job.mini_batch_sequences,
        "tokens_per_sequence_at_most": job.longest,
        "micro_batch_tokens": job.micro_batch_tokens(job.mini_batch_sequences),
        "micro_batches_per_optimizer_step": update,
        "micro_batches_of_scoring": scoring,
        "bubble_update": round(bubble(job.layout.pp, update), 4),
        "bubble_scoring": round(bubble(job.layout.pp, scoring), 4),
    }
    return out if job.scored else {name: value for name, value in out.items() if "scoring" not in name}


def schedule_warnings(job: PlannedJob) -> list[str]:
    """Ranks without work, and pipelines that mostly wait."""
    update, dp, pp = micro_batch_count(job), job.layout.dp, job.layout.pp
    out = []
    if job.mini_batch_sequences < dp:
        out.append(
            f"an optimizer step has {job.mini_batch_sequences} sequences for dp = {dp}: "
            f"{dp - job.mini_batch_sequences} replicas have no work: lower algorithm.mini_batches, or raise tp or pp"
        )
    if pp > 1 and bubble(pp, update) > 0.3:
        out.append(
            f"pipeline ranks wait {bubble(pp, update):.0%} of an update (pp = {pp}, {update} micro-batches): lower "
            "algorithm.micro_batch_tokens or pp, or put more sequences into an optimizer step"
        )
    return out
