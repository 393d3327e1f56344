"""What can be known to be wrong before anything heavy starts: files, packages, sizes, permissions. Writes nothing."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from hpc_rl.algo.registry import objective
from hpc_rl.config import Config
from hpc_rl.config_check import cross_check
from hpc_rl.data.prompt_files import read_records
from hpc_rl.errors import UserError
from hpc_rl.preflight_model import check_models
from hpc_rl.preflight_resume import check_resume, check_tokenizer, check_trained
from hpc_rl.reward.score import RewardFunction


def preflight(config: Config, world_size: int) -> None:
    """Refuses a run that cannot succeed; takes well under 3 s and imports neither torch, transformers nor vLLM.

    Exceptions: a tokenizer without tokenizer.json (transformers), ``launch.device=cuda`` with no GPU device file in
    sight (torch), and what the reward function's module imports.

    Args:
        config: the configuration.
        world_size: number of ranks that the job has or will have.

    Raises:
        UserError: one line with the value, the rule and the fix.
    """
    check_torchvision()
    hf_config = check_models(config)
    cross_check(config, world_size, hf_config)
    check_device(config)
    check_outputs(config)
    check_resume(config, hf_config)
    check_trained(config)
    check_metrics(config)
    check_data(config)


def check_data(config: Config) -> None:
    """Refuses a reward function that cannot be called, and prompts that lack what it needs. Raises UserError."""
    goal = objective(config.algorithm.name)
    if goal is None:
        required, needed_by = RewardFunction.from_config(config.reward).required_fields, "reward.function"
    else:
        required, needed_by = goal.fields, "algorithm.name"
    assert config.data.prompts is not None, "cross_check refuses a configuration without prompts"
    read_records(config.data.prompts, config.data.format, required, needed_by)
    if config.eval.every and config.data.eval_prompts:
        read_records(config.data.eval_prompts, config.data.format, required, needed_by)


def preflight_eval(config: Config, world_size: int) -> None:
    """Refuses an evaluation that cannot succeed; as cheap as `preflight`.

    Raises:
        UserError: one line with the value, the rule and the fix.
    """
    check_torchvision()
    hf_config = check_models(config)
    cross_check(config, world_size, hf_config)
    check_device(config)
    check_resume(config, hf_config)
    check_tokenizer(config)
    required = RewardFunction.from_config(config.reward).required_fields
    if not config.data.eval_prompts:
        raise UserError("data.eval_prompts is null, but an evaluation needs held-out prompts: set it to a JSONL file")
    read_records(config.data.eval_prompts, config.data.format, required)


def check_torchvision() -> None:
    """Refuses a torchvision built for another torch: importing transformers would die in it. Raises UserError."""
    try:
        torchvision = importlib.metadata.distribution("torchvision")
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    from packaging.requirements import Requirement

    pins = [Requirement(text) for text in torchvision.requires or []]
    pinned = [str(pin.specifier) for pin in pins if pin.name == "torch" and torch.version not in pin.specifier]
    needs = f"torch{pinned[0]}" if pinned else None
    if needs is None and _needs_cuda_library(torchvision) and not _file(torch, "torch/lib/libtorch_cuda.so").exists():
        needs = "a CUDA build of torch"
    if needs is not None:
        raise UserError(
            f"torchvision {torchvision.version} needs {needs}, but torch is {torch.version}, so importing transformers "
            "would die with 'operator torchvision::nms does not exist': pip uninstall -y torchvision torchaudio "
            "torchcodec"
        )


def _file(dist: importlib.metadata.Distribution, name: str) -> Path:
    return Path(str(dist.locate_file(name)))


def _needs_cuda_library(torchvision: importlib.metadata.Distribution) -> bool:
    library = _file(torchvision, "torchvision/_C.so")
    return library.is_file() and b"libtorch_cuda.so" in library.read_bytes()


def check_device(config: Config) -> None:
    """Refuses ``launch.device=cuda`` where no GPU can be used. Raises UserError."""
    if config.launch.device != "cuda":
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if hidden in ("", "-1"):
        raise UserError(
            f"launch.device = cuda, but CUDA_VISIBLE_DEVICES = {hidden!r} hides every GPU: unset it, or set "
            "launch.device=cpu"
        )
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):
        raise UserError(
            f"launch.device = cuda, but the installed torch {version} is a CPU build: install the GPU requirements, "
            "or set launch.device=cpu"
        )
    if not glob.glob("/dev/nvidia[0-9]*"):
        import torch  # slow, but right where device files have other names

        if not torch.cuda.is_available():
            raise UserError(
                "launch.device = cuda, but no GPU is there (no /dev/nvidia*, and torch sees none): run on a GPU node, "
                "or set launch.device=cpu"
            )


def check_outputs(config: Config) -> None:
    """Refuses a run directory that cannot be written. Raises UserError."""
    run_dir = Path(config.run.dir)
    for path in (run_dir, *(run_dir / name for name in ("checkpoints", "rollouts", "logs"))):
        _check_writable(path)
    for name in ("config.yaml", "metrics.jsonl"):
        if (run_dir / name).exists() and not os.access(run_dir / name, os.W_OK):
            raise UserError(
                f"{run_dir / name}: may not be written by this user: correct its owner, or set another run.dir"
            )


def _check_writable(path: Path) -> None:
    """Refuses a directory that is there and not writable, or not there and cannot be made."""
    for place in (path, *path.absolute().parents):
        if os.path.lexists(place):
            break
    if not place.is_dir():
        raise UserError(f"run.dir: {path} cannot be a directory, because {place} is a file: set another run.dir")
    if not os.access(place, os.W_OK | os.X_OK):
        what = "is not writable" if place == path else f"cannot be made, because {place} is not writable"
        raise UserError(f"run.dir: {path} {what} by this user: correct its permissions, or set another run.dir")


def check_metrics(config: Config) -> None:
    """Refuses metrics whose package is not installed. Raises UserError."""
    wanted = {
        "metrics.tensorboard": ("tensorboard", config.metrics.tensorboard),
        "metrics.prometheus_port": ("prometheus_client", config.metrics.prometheus_port is not None),
    }
    for key, (package, is_wanted) in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise UserError(f"{key} is set, but needs {package}, which is not installed: pip install {package}")
