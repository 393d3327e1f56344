"""Which rank takes which sequences, and in which micro-batches. Pure: lengths in, index lists out.

The same on every rank, so no communication is needed to agree; and every rank gets the same number of micro-batches,
because ranks that leave a loop of collectives early leave the others waiting.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def partition(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Splits sequences over ranks so that the largest number of tokens of a rank is near the least possible.

    Longest first, each to the rank with the fewest tokens so far (at most 4/3 - 1/(3 num_ranks) of the optimum).

    Args:
        lengths: tokens of each sequence.
        num_ranks: data-parallel ranks.

    Returns:
        Indices of each rank, ascending. Some ranks get none if there are fewer sequences than ranks.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969).
    """
    assert num_ranks >= 1, f"num_ranks is {num_ranks}, must be at least 1"
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, 0, rank) for rank in range(num_ranks)]  # tokens, then sequences: empty ones spread out too
    for index in _longest_first(lengths, range(len(lengths))):
        tokens, count, rank = heap[0]
        ranks[rank].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], count + 1, rank))
    return [sorted(indices) for indices in ranks]


def micro_batches(lengths: Sequence[int], ranks: Sequence[Sequence[int]], token_budget: int) -> list[list[list[int]]]:
    """Packs each rank's sequences into micro-batches of at most ``token_budget`` tokens.

    Args:
        lengths: tokens of each sequence.
        ranks: indices of each rank, as `partition` gives them.
        token_budget: most tokens of a micro-batch; a longer sequence is alone in one.

    Returns:
        ``[rank][micro-batch]`` -> indices, ascending. All ranks have the same number of micro-batches; one that needs
        fewer splits its fullest, and has empty ones only when it has fewer sequences than that.
    """
    assert token_budget >= 1, f"token_budget is {token_budget}, must be at least 1"
    packed = [_pack(lengths, indices, token_budget) for indices in ranks]
    count = max((len(bins) for bins in packed), default=0)
    return [_pad(lengths, bins, count) for bins in packed]


def _longest_first(lengths: Sequence[int], indices: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))


def _pack(lengths: Sequence[int], indices: Sequence[int], token_budget: int) -> list[list[int]]:
    """Best fit, longest first: each sequence goes where the least room is left over."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for index in _longest_first(lengths, indices):
        place = bisect_left(room, (lengths[index], 0))
        if place == len(room):
            bins.append([])
            left, chosen = token_budget, len(bins) - 1
        else:
            left, chosen = room.pop(place)
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return bins


def _pad(lengths: Sequence[int], bins: list[list[int]], count: int) -> list[list[int]]:
    """As many micro-batches as ``count``: first by splitting the fullest, then by empty ones."""
    heap = [
        (-sum(lengths[i] for i in indices), number, indices) for number, indices in enumerate(bins) if len(indices) > 1
    ]
    heapq.heapify(heap)
    done = [indices for indices in bins if len(indices) <= 1]
    number = len(bins)
    while heap and len(heap) + len(done) < count:
        _, _, indices = heapq.heappop(heap)
        local = [lengths[i] for i in indices]
        for half in partition(local, 2):
            part = [indices[i] for i in half]
            number += 1
            if len(part) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in part), number, part))
            else:
                done.append(part)
    full = sorted((sorted(indices) for indices in (*done, *(entry[2] for entry in heap))), key=lambda part: part[0])
    return full + [[] for _ in range(count - len(full))]
