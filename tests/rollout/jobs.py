"""What the ranks of the vLLM tests do; each function runs in a forked process, see tests/ranks.py."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_rl.config import RolloutConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.parallel.layout import replica_of
from hpc_rl.rollout import vllm_cpu
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.rollout.sampler import assign
from hpc_rl.rollout.vllm import VLLMEngine
from hpc_rl.tensors.shardmap import view
from tests.rollout.models import VOCAB_SIZE, character_tokenizer

LIMIT = 24
MAX_MODEL_LEN = 128
TEMPERATURE = 0.7
STOP = ["zzzz", *(chr(c) + chr(d) for c in range(65, 71) for d in range(33, 127))]  # A to F and any character
LENGTHS = (5, 12, 40, 70, 70, 33)  # of prompts; blocks of the KV cache have 32 tokens


def prompts() -> list[Prompt]:
    rng = random.Random(0)
    ids = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(n)) for n in LENGTHS]
    ids[4] = ids[3][:64] + ids[4][64:]  # shares two cached blocks with another
    return [Prompt(100 + i, x, "") for i, x in enumerate(ids)]


def requests(samples: int = 1) -> list[Request]:
    return [Request(p, i, k, 1000 * i + k) for i, p in enumerate(prompts()) for k in range(samples)]


def make_engine(model_dir: str, tp: int, tokenizer: Any = None, train_tp: int = 1, **changes: Any) -> VLLMEngine:
    values = {
        "max_response_tokens": LIMIT, "temperature": TEMPERATURE, "samples_per_prompt": 2, "block_size": 32,
        "kv_cache_bytes": 8 << 20, "max_num_seqs": 64,
    } | changes  # fmt: skip
    return VLLMEngine(
        model_dir, RolloutConfig(**values), dtype="float32", max_model_len=MAX_MODEL_LEN, tp=tp, seed=0, device="cpu",
        tokenizer=tokenizer, train_tp=train_tp,
    )  # fmt: skip


@torch.no_grad()
def write(engine: VLLMEngine, weights: dict[str, Tensor]) -> None:
    """Copies canonical tensors into the live parameters, as resharding does."""
    shard_map, local = engine.shard_map()
    for piece in shard_map.pieces:
        box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
        view(piece, local[piece.local]).copy_(weights[piece.name][box])


def everything(
    model_dirs: dict[str, str], weights: dict[str, list[dict[str, Tensor]]], tp: int, train_tp: int
) -> dict[str, Any]:
    """For each model: its map, greedy and sampled responses, and those after an update of the weights."""
    dist.init_process_group("gloo")
    out: dict[str, Any] = {}
    for kind, model_dir in model_dirs.items():
        engine = make_engine(model_dir, tp, train_tp=train_tp)
        shard_map, local = engine.shard_map()
        out[kind] = result = {"map": shard_map, "numels": {n: t.numel() for n, t in local.items()}}
        for version in (0, 1):
            write(engine, weights[kind][version])
            engine.set_version(version)
            mine = assign(requests(), replica_of(dist.get_rank(), tp, train_tp)[0], dist.get_world_size() // tp)
            result["greedy", version] = engine.generate(mine, temperature=0)
            result["sampled", version] = engine.generate(mine)
        result["padding_is_zero"] = all(float(local[name][-1].abs().sum()) == 0.0 for name in shard_map.padding)
        engine.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's group outlives the engines
    out["ranks"] = int(total)
    return out


def _observable() -> list[Any]:
    """What a trainer would notice if vLLM changed it."""
    kept = (torch.Event, torch.cuda.Event, torch.cuda.Stream, torch.set_num_threads, torch.Tensor.pin_memory)
    return [
        torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), dict(os.environ),
        torch.get_float32_matmul_precision(), torch.get_num_threads(), [id(x) for x in kept],
    ]  # fmt: skip


def manners(model_dir: str, weights: dict[str, Tensor]) -> dict[str, Any]:
    """One process: seeds, order, callbacks, and what the trainer sees of vLLM."""
    out: dict[str, Any] = {}
    torch.manual_seed(5)
    before = _observable()
    engine = make_engine(model_dir, 1)
    out["changed_by_start"] = [i for i, (a, b) in enumerate(zip(before, _observable(), strict=True)) if a != b]
    write(engine, weights)
    engine.set_version(3)
    before = _observable()
    events: list[tuple[str, int, int]] = []
    draws: list[float] = []

    def on_finished(sample: Sample) -> None:
        events.append((sample.text, sample.request.group_id, len(sample.response_ids)))
        draws.append(float(torch.rand(())))

    out["all"] = engine.generate(requests(2), on_finished)
    torch.manual_seed(5)
    out["callback_draws"] = draws == [float(torch.rand(())) for _ in draws]
    out["events"] = events
    torch.manual_seed(5)
    out["changed_by_generate"] = [i for i, (a, b) in enumerate(zip(before, _observable(), strict=True)) if a != b]
    out["backwards"] = engine.generate(requests(2)[::-1])
    out["alone"] = [engine.generate([request])[0] for request in requests(2)]
    out["other_seed"] = engine.generate([Request(r.prompt, r.group_id, r.sample_id, r.seed + 7) for r in requests(2)])
    out["crowded"] = engine.generate([*_crowd(), *requests(2)])[-len(requests(2)) :]
    out["refused"] = _refused(engine)
    out["interrupted"] = _interrupted(engine)
    out["after"] = engine.generate(requests(2))
    engine.sleep()
    engine.wake(["kv_cache"])  # nothing sleeps on CPU
    out["after_wake"] = engine.generate(requests(2))
    engine.close()
    return out


def _crowd() -> list[Request]:
    """Prompts of 20,000 tokens in all: more than vLLM takes in one step."""
    rng = random.Random(1)
    ids = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(80)) for _ in range(250)]
    return [Request(Prompt(200 + i, x, ""), 10 + i, 0, i) for i, x in enumerate(ids)]


def _refused(engine: VLLMEngine) -> dict[str, str]:
    def message(ids: tuple[int, ...]) -> str:
        try:
            engine.generate([Request(Prompt(7, ids, ""), 0, 0, 1)])
        except UserError as error:
            return str(error)
        return "accepted"

    limit = MAX_MODEL_LEN - LIMIT
    return {
        "fits": message((9,) * limit), "long": message((9,) * (limit + 1)), "empty": message(()),
        "id": message((9, VOCAB_SIZE)),
    }  # fmt: skip


def _interrupted(engine: VLLMEngine) -> str:
    """New weights while requests run."""
    try:
        engine.generate(requests(2), lambda sample: engine.set_version(4))
    except RunError as error:
        return str(error)
    return "accepted"


def sampling(model_dir: str, weights: dict[str, Tensor]) -> dict[str, Any]:
    """One process: truncated sampling, stop strings, texts, several EOS ids, few sequences at once."""
    tokenizer = character_tokenizer()
    out: dict[str, Any] = {"tokenizer": tokenizer}
    settings: dict[str, dict[str, Any]] = {
        "plain": {}, "top_p": {"top_p": 0.6}, "top_k": {"top_k": 3}, "few": {"max_num_seqs": 2},
        "stop": {"stop": STOP},
    }  # fmt: skip
    for name, changes in settings.items():
        engine = make_engine(model_dir, 1, tokenizer, **changes)
        write(engine, weights)
        engine.set_version(0)
        out[name] = engine.generate(requests(4))
        engine.close()
    return out


def refusals(model_dirs: dict[str, str]) -> dict[str, str]:
    """What the constructor says to settings that cannot work."""
    from hpc_rl.rollout.vllm_map import live_shard_map

    def message(make: Any) -> str:
        try:
            make()
        except UserError as error:
            return str(error)
        return "accepted"

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        bilinear = message(lambda: live_shard_map(torch.nn.Sequential(torch.nn.Bilinear(2, 3, 4))))
        stop = message(lambda: make_engine(model_dirs["llama"], 2, stop=["x"]))
        three = message(lambda: make_engine(model_dirs["llama"], 3))
    else:
        bilinear = stop = three = ""
    heads = message(lambda: make_engine(model_dirs["heads"], 1))
    memory = message(lambda: make_engine(model_dirs["llama"], 1, kv_cache_bytes=1 << 14))
    block = message(lambda: make_engine(model_dirs["llama"], 1, block_size=16))
    engine = make_engine(model_dirs["llama"], 1, kv_cache_bytes=None, block_size=None)
    size = str(engine._core.vllm_config.cache_config.kv_cache_memory_bytes)
    engine.close()
    vllm_cpu.MAX_KV_CACHE_BYTES = 1
    long = message(lambda: make_engine(model_dirs["llama"], 1, kv_cache_bytes=None, block_size=None))
    return {
        "class": bilinear, "stop": stop, "tp": three, "head_size": heads, "memory": memory, "default_memory": size,
        "one_sequence": long, "block": block,
    }  # fmt: skip


def generate_and_die(model_dir: str, weights: dict[str, Tensor]) -> None:
    """A tensor-parallel job that is killed while its engine lives."""
    generate_twice(model_dir, weights)
    os.kill(os.getpid(), signal.SIGKILL)


def generate_twice(model_dir: str, weights: dict[str, Tensor]) -> list[tuple[int, ...]]:
    """A tensor-parallel job whose engine lives until the process ends."""
    dist.init_process_group("gloo")
    engine = make_engine(model_dir, dist.get_world_size())
    write(engine, weights)
    engine.set_version(0)
    first = [s.response_ids for s in engine.generate(requests(2))]
    assert [s.response_ids for s in engine.generate(requests(2))] == first
    return first
