"""What `hpc-rl train` and `eval` do: check, start the ranks or take a place among them, work, say what was made."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpc_rl.algo.registry import objective
from hpc_rl.config import Config
from hpc_rl.config_load import load_config
from hpc_rl.errors import RunError, UserError
from hpc_rl.fault.decide import TRY_AGAIN
from hpc_rl.fault.edge import Reporter, reporting
from hpc_rl.fault.local import conclude, num_oom_kills
from hpc_rl.fault.phase import phase
from hpc_rl.fault.report import ATTEMPT_VARIABLE, attempt_number, begin_attempt
from hpc_rl.fault.watchdog import Watchdog, limit_of
from hpc_rl.plan.fit import fit, notes
from hpc_rl.run_dir import find_run_checkpoint, set_aside
from hpc_rl.storage.lock import RunLock
from launch.env import RankInfo, detect, finish, is_supervised, job_id, node_name
from launch.local import run_local, thread_env
from launch.spec import check_placement

if TYPE_CHECKING:
    from hpc_rl.trainer import Trainer


def run_train(path: Path, overrides: Sequence[str]) -> int:
    """Runs a training; returns the exit code.

    Without a launcher and with ``launch.nproc`` > 1 this process starts the local ranks and waits for them. All that
    can be wrong with the input is found before.
    """
    from hpc_rl.preflight import preflight

    info = detect()
    given = load_config(path, overrides)
    config = placed(given, info)
    for warning in [*notes(given, config), *check_placement(config.parallel, info.num_nodes, info.local_world_size)]:
        if info.rank == 0 and not is_supervised() and info.launcher != "local":  # said by whoever starts such ranks
            print(f"hpc-rl: warning: {warning}", file=sys.stderr)
    if info.launcher != "none":
        reporter = make_reporter(info, Path(config.run.dir), Path(config.run.dir) / "logs")
        with reporting(reporter):
            if info.rank == 0:
                preflight(config, info.world_size)
        return train_here(config, reporter)
    nproc = config.launch.nproc
    if nproc == 1:
        os.environ |= thread_env(config.launch.threads)  # before a reward function imports torch, which reads it
    preflight(config, nproc)
    check_local_ranks(nproc)
    with RunLock(config.run.dir, job_id()):  # a run of another job in there is not moved, but told
        line = set_aside(config)
        begin_attempt(config.run.dir)
    if line is not None:
        print(line, flush=True)
    if nproc > 1:
        return start_ranks(
            config, ["train", str(path), *overrides], Path(config.run.dir), Path(config.run.dir) / "logs"
        )
    return train_here(config, make_reporter(info, Path(config.run.dir), Path(config.run.dir) / "logs"))


def start_ranks(config: Config, arguments: Sequence[str], run_dir: Path, log_dir: Path) -> int:
    """Runs ``hpc-rl ARGUMENTS`` as ``launch.nproc`` ranks; returns the exit code, having said why it is not 0.

    Args:
        run_dir: where the ranks report failures. log_dir: for what they print.
    """
    nproc, oom_kills = config.launch.nproc, num_oom_kills()
    return run_local(
        nproc,
        [sys.executable, "-m", "hpc_rl.cli", *arguments],
        log_dir=log_dir,
        env={"OMP_NUM_THREADS": str(config.launch.threads), ATTEMPT_VARIABLE: str(attempt_number())},
        on_failure=lambda ended: conclude(run_dir, log_dir, nproc, ended, node_name(), oom_kills),
    )


def make_reporter(info: RankInfo, run_dir: Path, log_dir: Path) -> Reporter:
    """How this rank reports a failure. With local ranks the terminal is for the launcher's one line."""
    is_local = info.launcher == "local"
    return Reporter(
        run_dir,
        info.rank,
        node_name(),
        is_alone=not is_local and ATTEMPT_VARIABLE not in os.environ,
        log=log_dir / "rank_0.log" if is_local and info.rank == 0 else None,
    )


def placed(config: Config, info: RankInfo) -> Config:
    """What `fit` leaves; with ``parallel: auto`` the layout for this job's ranks and GPUs, the same on every rank."""
    if not config.parallel.auto:
        return fit(config)
    from hpc_rl.plan.choose import chosen
    from hpc_rl.plan.hardware import gpu_here

    nodes, ranks = (1, config.launch.nproc) if info.launcher == "none" else (info.num_nodes, info.local_world_size)
    return chosen(config, gpu_here(config.launch.device), nodes, ranks)


RANKS_PER_CORE = 8  # beyond it a machine only swaps; tests run 8 ranks on 2 cores


def check_local_ranks(nproc: int) -> None:
    """Refuses to start more ranks here than this machine can run. Raises UserError."""
    limit = RANKS_PER_CORE * (os.cpu_count() or 1)
    if nproc > limit:
        raise UserError(
            f"launch.nproc = {nproc}, but this machine has {os.cpu_count()} cores and runs at most {limit} ranks: set "
            "launch.nproc lower, or start the job with mpirun or srun over several nodes"
        )


def watched(config: Config, reporter: Reporter) -> Watchdog:
    """The watchdog of this rank, at its post."""
    watchdog = Watchdog(
        reporter.run_dir,
        reporter.rank,
        reporter.node,
        partial(limit_of, config.fault),
        announce=detect().launcher != "local",
        is_alone=reporter.is_alone,
    )
    watchdog.start()
    return watchdog


def train_here(config: Config, reporter: Reporter) -> int:
    """Trains on this rank; returns the exit code. A failure is recorded before anything is torn down."""
    if config.launch.device == "cpu":  # a GPU that must not be used must not be seen: Megatron would take it
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    info = detect()
    watchdog = watched(config, reporter)
    trainer: Trainer | None = None
    try:
        with reporting(reporter):
            import_heavy()
            trainer = make_trainer(config)
            signal.signal(signal.SIGINT, interrupted)
            trainer.train()
    except RunError:  # every rank has it: they wait together for the checkpoint in flight
        if trainer is not None:
            trainer.close()
        raise
    except BaseException:  # the others may stand in another collective, so leave without one
        if trainer is not None:
            trainer.sinks.close()
            trainer.job.checkpointer.close()
        raise
    with reporting(reporter), phase("end", trainer.steps_done):
        trainer.close()
    watchdog.stop()
    code = 0
    if trainer.stopped_by is not None:
        code = stopped(config, trainer.steps_done, trainer.stopped_by, info.rank)
    elif info.rank == 0:
        print(closing_words(config, trainer.steps_done), flush=True)
    finish(info)
    return code


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C is as polite as SIGTERM: the step ends and is saved. A second one ends at once, whoever started us."""
    if detect().rank == 0:
        # Not print: the signal may have come in the middle of one.
        os.write(1, b"Interrupted: this step is the last, and will be saved (again: stop at once)\n")
    signal.raise_signal(signal.SIGTERM)


def stopped(config: Config, step: int, by: signal.Signals, rank: int) -> int:
    """Says where a run stopped; in a Slurm job that was told of its time limit, puts the job back into the queue.

    Returns: the exit code: 0 if the job goes on by itself or a supervisor decides, else `TRY_AGAIN`, or 143 after SIGTERM.
    """
    if rank == 0:
        print(f"Stopped by {by.name} after step {step} of {config.steps}, saved: resume=auto goes on", flush=True)
    if is_supervised():  # it sees to it; and srun would end the other ranks if this one returned anything else
        return 0
    requeue = job_id() if by is signal.SIGUSR1 else None
    if rank == 0 and requeue is not None:
        subprocess.run(["scontrol", "requeue", requeue], check=True)
    if requeue is not None:
        return 0
    return 128 + signal.SIGTERM if by is signal.SIGTERM else TRY_AGAIN


def make_trainer(config: Config) -> Trainer:
    """The trainer that ``algorithm.name`` asks for."""
    if objective(config.algorithm.name) is not None:
        from hpc_rl.supervised import SupervisedTrainer

        return SupervisedTrainer(config)
    from hpc_rl.train import RLTrainer

    return RLTrainer(config)


def import_heavy() -> None:
    """Imports what a rank needs, without garbage collections in between.

    They would walk the objects of all modules again and again: 1 of 6 s. What is there now stays, so no later
    collection looks at it either.
    """
    gc.disable()

    import hpc_rl.train  # noqa: F401

    gc.freeze()
    atexit.register(gc.unfreeze)  # frozen objects would outlive the interpreter
    gc.enable()


def closing_words(config: Config, step: int) -> str:
    """The run directory, and what to do next."""
    run_dir, role = config.run.dir, " --role critic" if config.algorithm.name == "reward_model" else ""
    return (
        f"Done: {step} steps in {run_dir}\n"
        f"  go on:    hpc-rl train {run_dir}/config.yaml resume=auto steps={2 * step}\n"
        f"  look:     hpc-rl inspect {run_dir}\n"
        f"  take out: hpc-rl export {run_dir} --hf {run_dir}/hf{role}"
    )


def run_eval(path: Path, overrides: Sequence[str], *, as_json: bool) -> dict[str, Any] | int:
    """`hpc-rl eval`: the report, or the exit code of local ranks, the first of which prints it.

    ``checkpoint=PATH`` among the overrides is a run directory or a checkpoint; without it ``resume`` counts.
    """
    from hpc_rl.preflight import preflight_eval

    given = [text.removeprefix("checkpoint=") for text in overrides if text.startswith("checkpoint=")]
    info = detect()
    config = placed(load_config(path, [text for text in overrides if not text.startswith("checkpoint=")]), info)
    if given:
        config = replace(config, resume=str(find_run_checkpoint(given[-1])))  # type: ignore[type-var]  # a dataclass of pydantic
    launched = info.launcher != "none"
    if not launched and config.launch.nproc == 1:
        os.environ |= thread_env(config.launch.threads)
    if not launched or info.rank == 0:
        preflight_eval(config, info.world_size if launched else config.launch.nproc)
    log_dir = Path(config.run.dir) / "logs" / "eval"  # a training may run in the run directory itself
    if not launched:
        begin_attempt(log_dir)
        if config.launch.nproc > 1:
            arguments = ["eval", str(path), *overrides, *(["--json"] if as_json else [])]
            return start_ranks(config, arguments, log_dir, log_dir)
    reporter = make_reporter(info, log_dir, log_dir)
    watchdog = watched(config, reporter)
    with reporting(reporter):
        from hpc_rl.evaluate import evaluate_model

        report = evaluate_model(config)
    watchdog.stop()
    finish(info)
    return report if info.rank == 0 else 0


def run_launch(path: Path, overrides: Sequence[str], launcher: str, *, dry_run: bool) -> int:
    """`hpc-rl launch`: the exact command of a launcher, run or only printed."""
    from launch.spec import launch

    if not path.is_file():
        raise UserError(f"there is no configuration {path}: give the path of a YAML file")
    return launch(launcher, path, overrides, dry_run=dry_run)
