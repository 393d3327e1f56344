"""How many nodes the next slice of a job should have: a pure function of the queue and of measured speeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_EFFICIENCY = 0.7  # tokens/s per node, against the best measured; more nodes than that would be wasted


@dataclass(frozen=True, slots=True)
class Queue:
    """The partition as it is now: nodes that are idle, and jobs of others that wait for some."""

    idle_nodes: int
    pending_jobs: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A number of nodes, and why."""

    nodes: int
    text: str


def choose_size(
    current: int, sizes: Sequence[int], queue: Queue, tokens_per_second: Mapping[int, float], least: int, most: int
) -> Choice:
    """The most nodes that are there without waiting, and that are worth it.

    Idle nodes count as ours only while nobody else waits for them. A size is worth it if its measured tokens/s per node
    is at least `MIN_EFFICIENCY` of the best measured; one that was never measured is tried, unless a smaller one was
    already not worth it.

    Args:
        current: nodes of the slice that ends, which are ours until then.
        sizes: numbers of nodes that the layout allows.
        queue: of the job's partition.
        tokens_per_second: number of nodes -> measured throughput of the whole job.
        least: job.min_nodes; waited for, if it must be.
        most: job.max_nodes.
    """
    allowed = sorted(size for size in sizes if least <= size <= most)
    if not allowed:
        return Choice(current, f"no size from {least} to {most} nodes fits the layout")
    available = current + (queue.idle_nodes if queue.pending_jobs == 0 else 0)
    per_node = {nodes: rate / nodes for nodes, rate in tokens_per_second.items()}
    best = max(per_node.values(), default=0.0)
    wasteful = [nodes for nodes, rate in per_node.items() if rate < MIN_EFFICIENCY * best]
    limit = min((nodes - 1 for nodes in wasteful), default=most)
    fitting = [size for size in allowed if size <= min(available, limit)]
    nodes = fitting[-1] if fitting else allowed[0]
    measured = ", ".join(f"{n} nodes {rate:.0f} tokens/s" for n, rate in sorted(tokens_per_second.items()))
    text = f"{queue.idle_nodes} idle nodes, {queue.pending_jobs} pending jobs, measured: {measured or 'nothing yet'}"
    return Choice(nodes, text)


def measured_rates(metrics: Path, attempts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Number of nodes -> median tokens/s of the run's steps, those right after a start left out.

    Args:
        metrics: ``metrics.jsonl`` of the run.
        attempts: (nodes, step that it began after) of every start of the ranks, oldest first.
    """
    rates: dict[int, list[float]] = {}
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            values = json.loads(line)
            step, rate = int(values["step"]), float(values["tokens_per_second"])
        except (ValueError, KeyError, TypeError):
            continue
        began = [(nodes, began_at) for nodes, began_at in attempts if began_at < step]
        if began and step > began[-1][1] + 1:
            rates.setdefault(began[-1][0], []).append(rate)
    return {nodes: statistics.median(values) for nodes, values in rates.items()}
