"""`hpc-rl bench step`: one RL step in its parts, each beside the limit of the device, measured in the same run.

On a GPU the model is that of configs/bench_1b.yaml (random 1.41 B Qwen2); elsewhere a tiny one, to see that it runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import bar
from hpc_rl.batch import Batch, cumulative
from hpc_rl.config import Config
from hpc_rl.config_load import load_config
from hpc_rl.rollout.collect import step_requests
from hpc_rl.train import RLTrainer

CONFIG = Path(__file__).parents[1] / "configs" / "bench_1b.yaml"
VOCAB = 32768


def reward(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """A score that costs nothing and differs between responses."""
    return float(len(response) % 17) / 17


def run(quick: bool = False) -> dict[str, Any]:
    """All parts; with ``quick`` fewer repeats and no 1024-sequence generation."""
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        prompts, samples, prompt_len, response_len = (256, 8, 128, 512) if cuda and not quick else (64, 8, 128, 256)
        if not cuda:
            prompts, samples, prompt_len, response_len = 4, 2, 16, 16
        config = bench_config(Path(scratch), prompts, samples, prompt_len, response_len, cuda)
        trainer = RLTrainer(config)
        ceilings = measure_ceilings(trainer.job.parallel.device)
        rows = [{"what": k, "value": v} for k, v in ceilings.items()]
        bars = train_bars(trainer, ceilings, quick)
        bars += generation_bars(trainer, (64, 256, 512) if quick else (64, 256, 512, 1024), response_len, cuda)
        bars += transition_bars(trainer)
        bars += step_bars(trainer, 3 if quick else 4, rows)
        trainer.close()
    return {"bars": bars, "table": rows}


def bench_config(
    scratch: Path, prompts: int, samples: int, prompt_len: int, response_len: int, cuda: bool, **overrides: Any
) -> Config:
    """The benchmark's configuration, with a word-level tokenizer and random prompts in ``scratch``."""
    if not (scratch / "prompts.jsonl").exists():
        _write_inputs(scratch, prompts, prompt_len)
    values: dict[str, Any] = {
        "run.dir": scratch / "run",
        "model.tokenizer": scratch / "tokenizer",
        "data.prompts": scratch / "prompts.jsonl",
        "data.prompts_per_step": prompts,
        "data.max_prompt_tokens": prompt_len,
        "rollout.samples_per_prompt": samples,
        "rollout.max_response_tokens": response_len,
        "reward.function": "benchmarks.step:reward",
    }
    if not cuda:
        values |= {
            "model.config.hidden_size": 64,
            "model.config.intermediate_size": 128,
            "model.config.num_hidden_layers": 2,
            "model.config.num_attention_heads": 2,
            "model.dtype": "float32",
            "rollout.kv_cache_bytes": 1 << 26,
        }
    return load_config(CONFIG, [f"{k}={v}" for k, v in (values | overrides).items()])


def _write_inputs(scratch: Path, prompts: int, prompt_len: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(scratch / "tokenizer")
    with (scratch / "prompts.jsonl").open("w") as file:
        for i in range(prompts * 8):
            text = " ".join(f"t{(i * 7 + j) % 30000 + 2}" for j in range(prompt_len))
            file.write(json.dumps({"prompt_id": i, "text": text}) + "\n")


def seconds_of(work: Callable[[], Any], repeats: int = 3) -> float:
    """Median wall time of ``work``, the device drained before and after."""
    times = []
    for _ in range(repeats + 1):
        _drain()
        begin = time.perf_counter()
        work()
        _drain()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """What this device does at best now: bf16 matmul TFLOP/s, copy GB/s (bytes read plus written)."""
    n = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    big = torch.empty((1 << 30) if device.type == "cuda" else (1 << 24), device=device, dtype=torch.float32)
    other = torch.empty_like(big)
    matmul = seconds_of(lambda: [a @ b for _ in range(10)]) / 10
    copy = seconds_of(lambda: [other.copy_(big) for _ in range(5)]) / 5
    return {"matmul_tflops": 2 * n**3 / matmul / 1e12, "copy_gb_per_s": 2 * big.numel() * 4 / copy / 1e9}


def random_batch(num_sequences: int, low: int, high: int, prompt_len: int) -> Batch:
    """Packed sequences of ``low`` to ``high`` tokens, random ids."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high + 1, (num_sequences,), generator=g)
    cu_seqlens = cumulative(lengths)
    n = int(cu_seqlens[-1])
    position_ids = torch.arange(n) - cu_seqlens[:-1].repeat_interleave(lengths)
    mask = position_ids >= prompt_len
    tokens = {
        "input_ids": torch.randint(2, VOCAB, (n,), generator=g),
        "position_ids": position_ids,
        "response_mask": mask,
        "loss_weights": mask.float() / mask.sum(),
    }
    return Batch(cu_seqlens, tokens, {"prompt_ids": torch.arange(num_sequences)})


def train_bars(trainer: RLTrainer, ceilings: dict[str, float], quick: bool) -> list[dict[str, Any]]:
    """Training, scoring and the optimizer step, of 6 N and 2 N floating-point operations a token."""
    actor = trainer.job.actor
    trainer.job.colocation.train()
    cuda = trainer.job.parallel.device.type == "cuda"
    batch = random_batch(128 if cuda else 8, 512 if cuda else 16, 768 if cuda else 32, 128 if cuda else 8)
    params, n = actor.spec.num_params, batch.num_tokens
    assert actor.optimizer is not None
    optimizer = actor.optimizer
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def loss_fn(outputs: Any, micro: Batch) -> Any:
        return (micro["loss_weights"] * (-outputs["log_probs"] - 0.01 * outputs["entropy"])).sum(), {}

    step = seconds_of(lambda: actor.train_batch(batch, loss_fn), 2 if quick else 3)
    update = seconds_of(lambda: optimizer.step(1.0))
    score = seconds_of(lambda: actor.forward(batch), 2 if quick else 3)
    # AdamW reads gradient, weight and both moments, writes the last three (float32) and the bf16 weight.
    moved = params * (4 * 4 + 3 * 4 + 2)
    out = [
        bar("train_tflops", 6 * params * n / (step - update) / 1e12, "TFLOP/s", 400, "higher"),
        bar("score_tflops", 2 * params * n / score / 1e12, "TFLOP/s", 450, "higher"),
        bar("optimizer_bandwidth_fraction", moved / update / 1e9 / ceilings["copy_gb_per_s"], "", 0.7, "higher"),
    ]
    if cuda:
        out.append(bar("train_peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB", 140, "lower"))
    return out


def generation_bars(trainer: RLTrainer, counts: tuple[int, ...], response_len: int, cuda: bool) -> list[dict[str, Any]]:
    """Sampled tokens per second at several batch sizes, all responses running to their limit."""
    job = trainer.job
    job.colocation.reshard()
    job.colocation.generate()
    out = []
    for count in counts if cuda else (8,):
        prompts = [job.prompts.next_step()[0] for _ in range(max(1, count // 8))]
        requests = step_requests(prompts, 8, 1, count)[:count]
        begin = time.perf_counter()
        samples = job.sampler.generate(requests)
        seconds = time.perf_counter() - begin
        tokens = sum(len(s.response_ids) for s in samples)
        goal = 55_000 if count == 512 else 0
        out.append(bar(f"generate_{count}_tokens_per_s", tokens / seconds, "tok/s", goal, "higher"))
    return out


def transition_bars(trainer: RLTrainer) -> list[dict[str, Any]]:
    """Sampler to sleep, trainer in; weights over; sampler awake: the seconds that no token is made in."""
    job = trainer.job

    def cycle() -> None:
        job.colocation.train()
        job.colocation.reshard()
        job.resharder.sync(trainer.steps_done)
        job.colocation.generate()

    seconds = seconds_of(cycle)
    reshard = statistics.median(job.resharder.sync(trainer.steps_done)["seconds"] for _ in range(5))
    goal = 1.0 if trainer.config.parallel.offload else 0.15
    return [
        bar("transition_seconds", seconds, "s", goal, "lower"),
        bar("reshard_milliseconds", 1e3 * reshard, "ms", 3, "lower"),
    ]


def step_bars(trainer: RLTrainer, steps: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole RL steps; the first is left out."""
    trainer._sync_weights()
    metrics = [trainer.step(i + 1) for i in range(steps)][1:]
    for i, m in enumerate(metrics):
        rows += [{"what": f"step {i + 2}: {k}", "value": v} for k, v in m.items() if k.startswith("seconds/")]
    median = statistics.median(m["tokens_per_second"] for m in metrics)
    return [
        bar("step_tokens_per_s", median, "tok/s", 27_200, "higher"),
        bar("step_seconds", statistics.median(m["step_seconds"] for m in metrics), "s", 0, "lower"),
    ]
