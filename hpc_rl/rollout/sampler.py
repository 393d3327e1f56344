"""Which sample is drawn where, from which seed, and how samples become a batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import chain

import torch

from hpc_rl.batch import Batch, cumulative
from hpc_rl.rollout.protocol import Request, Sample


def request_seed(run_seed: int, step: int, prompt_id: int, sample_id: int) -> int:
    """The seed of one sample: a stable 63-bit hash, so that rollouts do not depend on where they are drawn.

    Args:
        run_seed: ``seed`` of the run.
        step: RL step.
        prompt_id: as in the prompt file.
        sample_id: 0 .. samples_per_prompt - 1.

    Returns:
        0 .. 2**63 - 1.
    """
    key = struct.pack("<4q", *(value & (2**63 - 1) for value in (run_seed, step, prompt_id, sample_id)))
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def assign(requests: Sequence[Request], replica: int, replicas: int) -> list[Request]:
    """The share of one replica: a contiguous slice, sizes equal to within one request.

    Slices keep most groups on one replica, whose prefix cache then computes their prompt once.

    Args:
        requests: of the whole step, the same on every rank.
        replica: 0 .. replicas - 1.
        replicas: number of generation replicas.
    """
    assert 0 <= replica < replicas, f"replica {replica} of {replicas}"
    return list(requests[len(requests) * replica // replicas : len(requests) * (replica + 1) // replicas])


def samples_to_batch(samples: Sequence[Sample], scores: Sequence[float] | None = None) -> Batch:
    """Prompt and response of each sample as one sequence, sorted by (group, sample).

    Args:
        samples: any number, in any order.
        scores: of each sample, for the array ``scores``; None: no such array.

    Returns:
        Batch with, per token, ``input_ids``, ``position_ids``, ``response_mask`` and ``rollout_log_probs`` (0 on the
        prompt); per sequence ``prompt_ids``, ``group_ids``, ``sample_ids``, ``finished`` and ``versions``. A response
        without tokens leaves its prompt, with no token masked as response.
    """
    order = sorted(range(len(samples)), key=lambda i: (samples[i].request.group_id, samples[i].request.sample_id))
    ordered = [samples[i] for i in order]
    prompts = [s.request.prompt.input_ids for s in ordered]
    prompt_lengths = torch.tensor([len(ids) for ids in prompts], dtype=torch.int64)
    response_lengths = torch.tensor([len(s.response_ids) for s in ordered], dtype=torch.int64)
    lengths = prompt_lengths + response_lengths
    cu_seqlens = cumulative(lengths)
    num_tokens = int(cu_seqlens[-1])
    ids = chain.from_iterable(chain(p, s.response_ids) for p, s in zip(prompts, ordered, strict=True))
    position_ids = torch.arange(num_tokens) - cu_seqlens[:-1].repeat_interleave(lengths)
    response_mask = position_ids >= prompt_lengths.repeat_interleave(lengths)
    log_probs = torch.zeros(num_tokens, dtype=torch.float32)
    log_probs[response_mask] = torch.tensor(
        list(chain.from_iterable(s.log_probs for s in ordered)), dtype=torch.float32
    )
    tokens = {
        "input_ids": torch.tensor(list(ids), dtype=torch.int64),
        "position_ids": position_ids,
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
    }
    sequences = {
        "prompt_ids": torch.tensor([s.request.prompt.prompt_id for s in ordered], dtype=torch.int64),
        "group_ids": torch.tensor([s.request.group_id for s in ordered], dtype=torch.int64),
        "sample_ids": torch.tensor([s.request.sample_id for s in ordered], dtype=torch.int64),
        "finished": torch.tensor([s.finished for s in ordered], dtype=torch.bool),
        "versions": torch.tensor([s.version for s in ordered], dtype=torch.int64),
    }
    if scores is not None:
        assert len(scores) == len(samples), f"{len(scores)} scores for {len(samples)} samples"
        sequences["scores"] = torch.tensor([scores[i] for i in order], dtype=torch.float32)
    return Batch(cu_seqlens, tokens, sequences)


def sort_batch(batch: Batch) -> Batch:
    """The same sequences by (group, sample), such as those that several replicas sampled."""
    by_sample = torch.argsort(batch["sample_ids"], stable=True)
    return batch.select(by_sample[torch.argsort(batch["group_ids"][by_sample], stable=True)])
