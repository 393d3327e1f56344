"""`hpc-rl bench two_gpus`: training, resharding, generation, checkpoints and a killed rank over NCCL on two GPUs.

Each scenario is a job of its own (two local ranks, this module as their program); rank 0 writes its figures as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import bar
from hpc_rl.errors import UserError
from launch.local import run_local

Figures = dict[str, Any]
EAGER = {"rollout.enforce_eager": True, "rollout.gpu_memory_utilization": 0.25}
LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "one": {},
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2},
    "dp2": {},
}


ALL_STEPS = (("grpo", "dp2"), ("grpo", "tp2"), ("ppo", "dp2"), ("ppo", "tp2"))


def run(quick: bool = False) -> dict[str, Any]:
    """All scenarios. Raises UserError where fewer than two GPUs are."""
    if torch.cuda.device_count() < 2:
        raise UserError(
            f"bench two_gpus needs 2 GPUs, torch sees {torch.cuda.device_count()}: run it on such a machine"
        )
    rows: list[Figures] = []
    with tempfile.TemporaryDirectory() as scratch:
        _config(Path(scratch), "one")  # the inputs, once for all scenarios

        def scenario(name: str, *args: str, nproc: int = 2) -> Figures:
            out = Path(scratch) / "figures.json"
            out.unlink(missing_ok=True)
            begin = time.perf_counter()
            argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.two_gpus", scratch, name, *args]
            code = run_local(nproc, argv, Path(scratch) / "logs")
            figures: Figures = {"what": " ".join((name, *args)), "exit": code}
            figures |= json.loads(out.read_text()) if out.exists() else {}
            figures["wall_s"] = round(time.perf_counter() - begin, 1)
            rows.append(figures)
            print(json.dumps(figures), flush=True)
            return figures

        train = scenario("train", "one", nproc=1) | scenario("train", "tp2", "pp2", "dp2")
        reshard = scenario("reshard", "2", "tp2", "pp2", "dp2") | scenario("reshard", "1", "tp2")
        for gen_tp in ("2", "1"):
            scenario("cycles", gen_tp)
        for algorithm, layout in (("grpo", "dp2"), ("ppo", "tp2")) if quick else ALL_STEPS:
            scenario("step", algorithm, layout)
        scenario("save", "tp2")
        scenario("resume", "dp2")
        scenario("resume", "one", nproc=1)
        rows.append(killed_rank(Path(scratch)))
        print(json.dumps(rows[-1]), flush=True)
    return {"bars": _bars(train, reshard), "table": rows}


def _bars(train: Figures, reshard: Figures) -> list[Figures]:
    one = train.get("one", {}).get("tokens_per_s", float("nan"))
    out = [
        bar(f"train_{n}_efficiency", train[n]["tokens_per_s"] / (2 * one), "", 0.8, "higher")
        for n in ("tp2", "pp2", "dp2")
        if n in train
    ]
    for name, f in reshard.items():
        if isinstance(f, dict) and f.get("bytes_received"):
            rate = f["link_gb_per_s"] / f["p2p_gb_per_s"]
            out.append(bar(f"reshard_{name.replace(' ', '_')}_link_fraction", rate, "", 0.8, "higher"))
    return out


# ---- what the ranks do -------------------------------------------------------------------------------------------


def _config(scratch: Path, layout: str, **values: Any) -> Any:
    from benchmarks.step import bench_config

    sizes = (64, 8, 128, 256) if torch.cuda.is_available() else (16, 2, 16, 16)
    return bench_config(
        scratch, *sizes, torch.cuda.is_available(), **{**LAYOUTS[layout], "launch.timeout_s": 120, **values}
    )


def train(scratch: Path, *layouts: str) -> Figures:
    """Per layout: tokens per second and the losses of three steps on the same global batch."""
    return {layout: _train(scratch, layout) for layout in layouts}


def _train(scratch: Path, layout: str) -> Figures:
    from benchmarks.step import random_batch, seconds_of
    from hpc_rl.build import build_engine, join
    from hpc_rl.parallel.state import leave_model_parallel

    config = _config(scratch, layout)
    actor = build_engine("actor", config, join(config))
    batch = random_batch(128, 512, 768, 128)

    def loss_fn(outputs: Any, micro: Any) -> Any:
        return (micro["loss_weights"] * (-outputs["log_probs"] - 0.01 * outputs["entropy"])).sum(), {}

    losses = [actor.train_batch(batch, loss_fn)["loss"] for _ in range(3)]
    seconds = seconds_of(lambda: actor.train_batch(batch, loss_fn), 2)
    figures = {"losses": losses, "tokens_per_s": batch.num_tokens / seconds, "peak_gib": _peak_gib()}
    actor.close()
    leave_model_parallel()
    return figures


def _peak_gib() -> float:
    """Of torch's allocator since the last call."""
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def reshard(scratch: Path, gen_tp: str, *layouts: str) -> Figures:
    """Per training layout: full syncs and one after an update, digests verified; the link's own rate beside it."""
    from hpc_rl.build import build_sampler, join
    from hpc_rl.parallel.state import leave_model_parallel

    config = _config(scratch, layouts[0], **EAGER, **{"rollout.tp": int(gen_tp)})
    parallel = join(config)
    sampler = build_sampler(config, parallel)
    p2p = _p2p_rate(parallel.device)
    figures: Figures = {}
    for layout in layouts:
        leave_model_parallel()
        figures[f"{layout} to tp{gen_tp}"] = {"p2p_gb_per_s": p2p} | _reshard(scratch, layout, gen_tp, sampler)
    return figures


def _reshard(scratch: Path, layout: str, gen_tp: str, sampler: Any) -> Figures:
    from hpc_rl.build import build_engine, join
    from hpc_rl.reshard.connect import connect

    config = _config(scratch, layout, **EAGER, **{"rollout.tp": int(gen_tp)})
    actor, target = build_engine("actor", config, join(config)), sampler.shard_map()
    name = f"{layout} {gen_tp}"
    dense = connect(actor.shard_map(), target, config=config.reshard, node_size=2, name=f"dense {name}")
    metrics = [dense.sync(i) for i in range(6)][1:]
    dense.verify()
    figures: Figures = {k: metrics[0][k] for k in ("bytes_local", "bytes_received", "bytes_lower_bound")}
    figures["seconds"] = statistics.median(m["seconds"] for m in metrics)
    figures["link_gb_per_s"] = figures["bytes_received"] / figures["seconds"] / 1e9
    figures["copy_gb_per_s"] = 2 * figures["bytes_local"] / figures["seconds"] / 1e9
    delta = connect(actor.shard_map(), target, config=_with_snapshot(config.reshard), node_size=2, name=f"delta {name}")
    delta.sync(0)
    with torch.no_grad():  # as after one small optimizer step: about one bf16 value in a hundred moves
        for p in actor.module.parameters():
            p.mul_(1.0 + 0.01 * (torch.rand(p.shape, device=p.device) < 0.01))
    for p in actor.module.parameters():
        _same_on_replicas(p.data)
    sparse = delta.sync(1)
    delta.verify()
    actor.close()
    return figures | {"delta_seconds": sparse["seconds"], "delta_bytes_received": sparse["bytes_received"]}


def _same_on_replicas(p: torch.Tensor) -> None:
    """DP replicas hold equal weights: rank 0's, where the layout has replicas."""
    from megatron.core import parallel_state as mpu

    if mpu.get_data_parallel_world_size() > 1:
        dist.broadcast(p, src=0, group=mpu.get_data_parallel_group())


def _with_snapshot(config: Any) -> Any:
    from dataclasses import replace

    return replace(config, snapshot="gpu")


def _p2p_rate(device: torch.device) -> float:
    """GB/s that one GPU receives while it sends as much, 1 GiB each way in one batch."""
    from benchmarks.step import seconds_of

    send = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    receive, peer = torch.empty_like(send), 1 - dist.get_rank()

    def swap() -> None:
        ops = [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return send.numel() / seconds_of(swap, 5) / 1e9


def _steps(scratch: Path, layout: str, steps: int, **values: Any) -> tuple[Any, list[Figures]]:
    from hpc_rl.train import RLTrainer

    trainer = RLTrainer(_config(scratch, layout, **values))
    return trainer, [trainer.step(trainer.steps_done + 1) for _ in range(steps)]


def cycles(scratch: Path, gen_tp: str) -> Figures:
    """Five train/generate cycles with sleep and off-load, every sync verified."""
    values = {**EAGER, "rollout.tp": int(gen_tp), "parallel.offload": True, "reshard.verify": "always"}
    values |= {"data.prompts_per_step": 16, "rollout.max_response_tokens": 64, "rollout.sleep_level": 2}
    _, metrics = _steps(scratch, "dp2", 5, **values)
    return {
        "mismatch_abs_max": max(m["mismatch/abs_max"] for m in metrics),
        "mismatch_abs_mean": max(m["mismatch/abs_mean"] for m in metrics),
        "seconds": [round(m["step_seconds"], 2) for m in metrics],
    }


def step(scratch: Path, algorithm: str, layout: str) -> Figures:
    """Whole RL steps, 64 x 8 samples of 128 + 256 tokens."""
    ppo = {"algorithm.kl_placement": "reward"} if algorithm == "ppo" else {}
    _, metrics = _steps(scratch, layout, 3, **EAGER, **{"algorithm.name": algorithm, **ppo})
    last = metrics[-1]
    keep = ("loss", "reward_mean", "tokens_per_second", "step_seconds", "mismatch/abs_mean")
    return {k: last[k] for k in (*keep, *(n for n in last if n.startswith("seconds/")))} | {"peak_gib": _peak_gib()}


_SMALL = {"data.prompts_per_step": 16, "rollout.max_response_tokens": 64, **EAGER}


def save(scratch: Path, layout: str) -> Figures:
    """Two steps and a checkpoint."""
    trainer, metrics = _steps(scratch, layout, 2, **_SMALL)
    begin = time.perf_counter()
    trainer._save(2, is_last=True)
    stall = time.perf_counter() - begin
    trainer.close()
    return {"reward_mean": metrics[-1]["reward_mean"], "stall_s": stall, "save_s": time.perf_counter() - begin}


def resume(scratch: Path, layout: str) -> Figures:
    """Continues `save`'s checkpoint at another layout."""
    begin = time.perf_counter()
    trainer, metrics = _steps(scratch, layout, 1, **_SMALL, resume="auto")
    assert trainer.steps_done == 3, f"resumed at step {trainer.steps_done - 1}, not 2"
    return {"loss": metrics[-1]["loss"], "mismatch_abs_mean": metrics[-1]["mismatch/abs_mean"],
            "seconds": time.perf_counter() - begin}  # fmt: skip


def forever(scratch: Path, layout: str) -> Figures:
    """Steps until it is killed; tells its pid and each step."""
    from hpc_rl.train import RLTrainer

    trainer = RLTrainer(_config(scratch, layout, **_SMALL, **{"run.dir": scratch / "killed", "launch.timeout_s": 60}))
    (scratch / f"pid{trainer.job.parallel.rank}").write_text(str(os.getpid()))
    for i in range(1000):
        trainer.step(i + 1)
        (scratch / f"step{trainer.job.parallel.rank}").write_text(str(i + 1))
    return {}


def killed_rank(scratch: Path) -> Figures:
    """SIGKILL of rank 1 in the middle of its work: how long until the whole job has ended."""
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.two_gpus", str(scratch), "forever", "tp2"]
    code = f"from launch.local import run_local; import sys; sys.exit(run_local(2, {argv!r}, {str(scratch)!r}))"
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (scratch / "step1").exists():
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(int((scratch / "pid1").read_text()), signal.SIGKILL)
    begin = time.monotonic()
    code_out = job.wait(timeout=120)
    return {"what": "killed rank", "exit": code_out, "seconds_to_end": time.monotonic() - begin}


SCENARIOS: Mapping[str, Callable[..., Figures]] = {
    f.__name__: f for f in (train, reshard, cycles, step, save, resume, forever)
}


def main() -> None:
    """One rank of one scenario: SCRATCH NAME ARG ..."""
    scratch, name, *args = sys.argv[1:]
    figures = SCENARIOS[name](Path(scratch), *args)
    if int(os.environ["RANK"]) == 0:
        (Path(scratch) / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
