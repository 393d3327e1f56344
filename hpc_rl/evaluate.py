"""How good a policy is on held-out prompts: pass@k, and the mean reward with its confidence interval."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_rl.batch import Batch
from hpc_rl.build import build_checkpointer, build_sampler, join, named_checkpoint
from hpc_rl.config import Config
from hpc_rl.data.prompts import PromptSet
from hpc_rl.data.tokenizer import load_tokenizer
from hpc_rl.errors import UserError
from hpc_rl.fault.phase import phase
from hpc_rl.metrics.sinks import plain
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import agree, gather_objects, rank, world_size
from hpc_rl.parallel.layout import replica_of
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.collect import Judge
from hpc_rl.rollout.protocol import Prompt, Request, RolloutEngine
from hpc_rl.rollout.sampler import assign, request_seed, samples_to_batch, sort_batch
from hpc_rl.rollout.vllm import VLLMEngine
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.tensors.hf import load_into, open_hf
from hpc_rl.tensors.shardmap import prefixed

_STEP = 0  # of the samples' seeds: no training step has it, and every evaluation draws with the same ones
_QUANTILE = 1.959964  # of the normal distribution, for 95%


def evaluate(
    sampler: RolloutEngine, reward: RewardFunction, prompts: Sequence[Prompt], config: Config
) -> dict[str, float]:
    """Samples ``eval.samples_per_prompt`` responses to each prompt and scores them. Every rank makes the same call.

    Returns: ``eval/pass_at_K``, ``eval/reward_mean`` and its 95% interval ``eval/reward_low``, ``eval/reward_high``,
        ``eval/response_tokens_mean``, ``eval/truncated_frac``, ``eval/num_prompts``, ``eval/seconds``.
    Raises: RunError on every rank if any rank's reward fails by policy.
    """
    begin = time.perf_counter()
    chosen = [prompts[i] for i in range(min(len(prompts), config.eval.num_prompts or len(prompts)))]
    num_samples = config.eval.samples_per_prompt
    requests = [
        Request(prompt, group, sample, request_seed(config.seed, _STEP, prompt.prompt_id, sample))
        for group, prompt in enumerate(chosen)
        for sample in range(num_samples)
    ]
    gen_tp = config.rollout.tp or config.parallel.tp
    replica, place = replica_of(rank(), gen_tp, config.parallel.tp)
    judge = Judge(reward)
    share = assign(requests, replica, world_size() // gen_tp)
    samples = sampler.generate(share, judge if place == 0 else None, temperature=config.eval.temperature)
    agree(judge.error)
    parts = gather_objects(samples_to_batch(samples, judge.scores_of(samples)) if place == 0 else None)
    batch = sort_batch(Batch.concat(part for part in parts if part is not None))
    metrics = summarize(batch["scores"].view(len(chosen), num_samples), config.eval.pass_score) | {
        "response_tokens_mean": float(batch["response_mask"].sum()) / len(batch),
        "truncated_frac": float((~batch["finished"]).double().mean()),
        "num_prompts": float(len(chosen)),
        "seconds": time.perf_counter() - begin,
    }
    return {f"eval/{name}": value for name, value in metrics.items()}


def summarize(scores: Tensor, pass_score: float) -> dict[str, float]:
    """pass@k, the mean score, and the interval that holds the mean of all such prompts with 95% confidence.

    The interval is mean +- 1.96 s / sqrt(P) with s the standard deviation of the P prompts' own means: samples of one
    prompt are no independent draws, prompts are. It ends at the lowest and highest mean of a prompt; with one prompt it
    is NaN.

    Args:
        scores: [P, n], n samples of each prompt.
        pass_score: a sample passes with this score or more.
    Returns: ``pass_at_K`` for K = 1, 2, 4, ... n, ``reward_mean``, ``reward_low``, ``reward_high``.
    """
    scores = scores.double()
    num_prompts, num_samples = scores.shape
    passed = (scores >= pass_score).sum(dim=1)
    ks = sorted({2**i for i in range(num_samples.bit_length())} & set(range(1, num_samples + 1)) | {num_samples})
    of_prompts = scores.mean(dim=1)
    mean = float(of_prompts.mean())
    half = float("nan") if num_prompts < 2 else _QUANTILE * float(of_prompts.std()) / num_prompts**0.5
    rates = {f"pass_at_{k}": float(pass_at_k(num_samples, passed, k).mean()) for k in ks}
    low, high = max(mean - half, float(of_prompts.min())), min(mean + half, float(of_prompts.max()))
    return rates | {"reward_mean": mean, "reward_low": low, "reward_high": high}


def pass_at_k(num_samples: int, num_passed: Tensor, k: int) -> Tensor:
    """1 - C(n - c, k) / C(n, k), an unbiased estimate of the chance that one of k samples passes: float64 [P].

    Args:
        num_samples: n, drawn per prompt.
        num_passed: int64 [P], c, those that passed.
        k: 1 .. n.
    Source: arXiv 2107.03374, eq. 1.
    """
    assert 1 <= k <= num_samples, f"pass@{k} of {num_samples} samples"
    failed = (num_samples - num_passed).double()[:, None]
    drawn = torch.arange(k, dtype=torch.float64)
    return 1.0 - ((failed - drawn).clamp(min=0.0) / (num_samples - drawn)).prod(dim=1)


def evaluate_model(config: Config) -> dict[str, Any]:
    """`hpc-rl eval`: the weights of the checkpoint that ``resume`` names, or of model.path, on data.eval_prompts.

    They go straight into the sampler's parameters, at any layout; no trainer is built. Every rank calls it.

    Raises: UserError for what does not fit.
    """
    tokenizer = load_tokenizer(config)
    reward = RewardFunction.from_config(config.reward)
    prompts = PromptSet.from_config(config, tokenizer, reward.required_fields, evaluation=True)
    parallel = join(config, None)
    checkpointer = build_checkpointer(config, parallel)
    checkpoint = named_checkpoint(config, checkpointer)
    own = checkpoint.parent.parent / "model" if checkpoint is not None and config.model.path is None else None
    if checkpoint is None and config.model.path is None:
        raise UserError("model.path is null and there is no checkpoint: give checkpoint=DIR, or set model.path")
    sampler = build_sampler(config, parallel, tokenizer, own)
    try:
        with phase("load"):
            _load_weights(sampler, config, checkpointer, checkpoint)
        with phase("eval"):
            metrics = evaluate(sampler, reward, prompts, config)
    finally:
        checkpointer.close()
        sampler.close()
        reward.close()
        parallel_state.destroy()
    return {"weights": str(checkpoint or config.model.path)} | {
        name.removeprefix("eval/"): plain(value) for name, value in metrics.items()
    }


@torch.no_grad()
def _load_weights(sampler: VLLMEngine, config: Config, checkpointer: Checkpointer, checkpoint: Path | None) -> None:
    shard_map, tensors = sampler.shard_map()
    if checkpoint is not None:
        checkpointer.load(checkpoint, {"actor": (prefixed(shard_map, canonical="param/"), tensors)})
    else:
        error: BaseException | None = None
        try:
            load_into(shard_map, tensors, open_hf(str(config.model.path)))
        except UserError as caught:  # the other ranks wait in `agree` to hear of it
            error = caught
        agree(error)
    sampler.set_version(0)
