"""The `hpc-rl` command. Each subcommand is thin: it parses, calls one function, prints."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_rl.errors import RunError, UserError
from hpc_rl.quiet import DEBUG_VARIABLE, quiet

if TYPE_CHECKING:
    from hpc_rl.fault.failure import Failure

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of LLMs as a batch job: Megatron-core, vLLM, HDF5.",
)

ConfigArg = Annotated[Path, typer.Argument(help="YAML configuration, for example configs/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example steps=10 parallel.tp=2")]
Debug = Annotated[bool, typer.Option("--debug", help="show what all libraries say (as HPC_RL_DEBUG=1 does)")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


@app.command(epilog="Example: hpc-rl train configs/quickstart.yaml steps=4 run.dir=runs/try")
def train(config: ConfigArg, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train. Starts the local ranks that the config asks for, or takes its place in a torchrun, mpirun or srun job."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    quiet()
    from hpc_rl.run import run_train

    raise typer.Exit(run_train(config, overrides or []))


@app.command("eval", epilog="Example: hpc-rl eval configs/quickstart.yaml checkpoint=runs/quickstart --json")
def eval_command(
    config: ConfigArg,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="checkpoint=RUN_OR_CHECKPOINT [model.path], key=value")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on the held-out prompts: pass@k, mean reward with its confidence interval."""
    quiet()
    from hpc_rl.run import run_eval

    report = run_eval(config, overrides or [], as_json=as_json)
    if isinstance(report, int):
        raise typer.Exit(report)
    _print(report, as_json)


@app.command(epilog="Example: hpc-rl inspect runs/default/checkpoints/checkpoint_20_complete --verify")
def inspect(
    paths: Annotated[list[Path], typer.Argument(help="a checkpoint, a shard file, a rollouts directory or a run")],
    verify: Annotated[bool, typer.Option(help="read everything and compare digests")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="compare two checkpoints, in the order given")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor (--json always does)")] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint, shard or rollout file holds."""
    from hpc_rl.storage.inspect import diff_paths, inspect_path

    if len(paths) != 1 + diff:
        rule = "--diff compares exactly 2 paths" if diff else "one path is shown at a time"
        raise UserError(f"inspect: got {len(paths)} paths: {rule}: use `inspect PATH` or `inspect --diff A B`")
    report = diff_paths(paths[0], paths[1]) if diff else inspect_path(paths[0], verify=verify)
    if report.get("kind") == "checkpoint" and not (tensors or as_json):
        report = {name: value for name, value in report.items() if name != "tensors"}
    _print(report, as_json)
    if (verify and "damaged: " in json.dumps(report, default=str)) or report.get("verified") is False:
        raise typer.Exit(1)


@app.command(epilog="Example: hpc-rl export runs/default --hf exported/")
def export(
    source: Annotated[Path, typer.Argument(help="a run directory or a checkpoint")],
    hf: Annotated[Path, typer.Option("--hf", help="directory to write: config.json, tokenizer, safetensors")],
    role: Annotated[str, typer.Option(help="actor (a causal LM) or critic (a sequence classifier)")] = "actor",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 [as the run computed]")] = None,
    model: Annotated[Path | None, typer.Option(help="directory of config.json and tokenizer [the run's]")] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face directory."""
    quiet()
    from hpc_rl.export import export_checkpoint

    _print(export_checkpoint(source, hf, role=role, dtype=dtype, model=model), as_json)


@app.command(epilog="Example: hpc-rl convert path/to/hf_model --to hpc_rl --out runs/imported")
def convert(
    source: Annotated[Path, typer.Argument(help="a run or checkpoint, an HF directory, or a torch DCP directory")],
    to: Annotated[str, typer.Option("--to", help="hf or dcp (from a checkpoint), hpc_rl (from the others)")],
    out: Annotated[Path, typer.Option("--out", help="directory to make")],
    role: Annotated[str, typer.Option(help="actor or critic")] = "actor",
    model: Annotated[Path | None, typer.Option(help="HF directory of config.json and tokenizer, for DCP")] = None,
    as_json: Json = False,
) -> None:
    """Carry parameters between this checkpoint format, Hugging Face and torch.distributed.checkpoint."""
    quiet()
    from hpc_rl.convert import convert as convert_parameters

    _print(convert_parameters(source, out, to, role=role, model=model), as_json)


@app.command(epilog="Example: hpc-rl bench reshard --quick --json")
def bench(
    name: Annotated[str, typer.Argument(help="checkpoint, learning, reshard, slurm, smollm2, step or two_gpus")],
    quick: Annotated[bool, typer.Option(help="smaller sizes, under a minute")] = False,
    as_json: Json = False,
) -> None:
    """Measure on this machine, and say how far from the limit it is."""
    quiet()
    from benchmarks import run_benchmark

    _print(run_benchmark(name, quick=quick), as_json)


@app.command(
    "plan",
    epilog="Example: hpc-rl plan configs/ppo_70b.yaml --nodes 16 --gpus-per-node 8 --gpu h100. "
    "Exit code 0: it fits; 3: it does not; 2: wrong input.",
)
def plan_command(
    config: ConfigArg,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(help="nodes; default: launch.nodes, or 1")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of a node; default: launch.nproc")] = None,
    gpu: Annotated[str | None, typer.Option(help="h100 (default), h200, b200, gh200, a100, a100-40, l40s")] = None,
    gpu_memory_gb: Annotated[float | None, typer.Option(help="memory of a GPU, instead of the table's")] = None,
    check: Annotated[
        bool, typer.Option("--verify-meta", help="build Megatron's true models of some ranks without weights, and compare")
    ] = False,
    as_json: Json = False,
) -> None:
    """Work out, without a GPU, who holds what, whether it fits, what moves and how large checkpoints are."""
    from hpc_rl.plan.report import plan, tables

    job, report = plan(
        config, overrides or [], nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu, gpu_memory_gb=gpu_memory_gb
    )
    shown = report if as_json else tables(job, report)
    if check:
        quiet()
        from hpc_rl.plan.verify import verify_meta

        shown["verified against the engine" if not as_json else "verified"] = verify_meta(job)
    _print(shown, as_json)
    raise typer.Exit(0 if report["fits"] else 3)


@app.command("launch", epilog="Example: hpc-rl launch --launcher srun --dry-run configs/ppo_70b.yaml steps=2")
def launch_command(
    config: ConfigArg,
    overrides: Overrides = None,
    launcher: Annotated[str, typer.Option(help="auto, torchrun, mpi or srun")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact command and stop")] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="in a batch script of Slurm: start the ranks again after a failure")
    ] = False,
) -> None:
    """Start a training job through a launcher."""
    if supervise:
        from hpc_rl.supervised_job import run_supervised

        raise typer.Exit(run_supervised(config, overrides or []))
    from hpc_rl.run import run_launch

    raise typer.Exit(run_launch(config, overrides or [], launcher, dry_run=dry_run))


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, default=str))
        return
    from hpc_rl.metrics.tables import render

    render(report)


def main(argv: list[str] | None = None, command: Callable[..., Any] = app) -> None:
    """Entry point: a user's error is one line and exit code 2, a stopped run ends with one line and exit code 1."""
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU machine has no Triton: no news
    try:
        command(argv) if argv is not None else command()
    except UserError as error:
        print(f"hpc-rl: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        from hpc_rl.fault.edge import recorded

        failure = recorded(error)
        if failure is None and not isinstance(error, RunError):
            raise
        _report_stop(error, failure)
        raise SystemExit(1) from None


def _report_stop(error: BaseException, failure: Failure | None) -> None:
    """Why a run stopped: what went wrong in it, then one line. Of a rank that only lost the others, the line alone."""
    from hpc_rl.fault.cause import is_consequence
    from hpc_rl.fault.report import describe
    from launch.env import detect

    if failure is None:
        print(f"hpc-rl: the run stopped: {error}", file=sys.stderr)
        return
    has_own_log = detect().launcher == "local"
    if not isinstance(error, RunError) and (has_own_log or not is_consequence(failure)):
        traceback.print_exception(error)
    print(f"hpc-rl: the run stopped: {describe(failure)}", file=sys.stderr)


if __name__ == "__main__":
    main()
