"""Rules between keys, the number of ranks and the model's sizes: checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.algo.checks import validate
from hpc_rl.algo.registry import objective
from hpc_rl.config import Config
from hpc_rl.config_schema import join_or
from hpc_rl.errors import UserError
from hpc_rl.fault.phase import PHASES

_LARGEST_DEFAULT_BLOCK = 128  # tokens of a KV cache block where vLLM chooses: on CPU; 16 on a GPU


def cross_check(
    config: Config, world_size: int, hf_config: Mapping[str, Any] | None = None, *, reads_text: bool = True
) -> None:
    """Refuses sizes that do not fit each other.

    Args:
        config: the configuration.
        world_size: number of ranks of the job.
        hf_config: values of the model's ``config.json``; None: read from ``model.path`` or ``model.config``.
        reads_text: tokenizer and prompts are needed, which a plan does without.

    Raises:
        UserError: one line with the values, the rule and the fix.
    """
    check_model_keys(config, reads_text=reads_text)
    validate(config)
    _check_layout(config, world_size)
    _check_algorithm(config)
    _check_fault(config)
    _check_model_sizes(config, read_hf_config(config) if hf_config is None else hf_config)


def read_hf_config(config: Config) -> dict[str, Any]:
    """The actor's HF config values. Raises UserError if there is none."""
    if config.model.path is None:
        return dict(config.model.config or {})
    return read_hf_config_file("model.path", config.model.path)


def read_hf_config_file(key: str, directory: str) -> dict[str, Any]:
    """The values of ``config.json`` in the HF directory that ``key`` names. Raises UserError."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        what = "a file" if Path(directory).exists() else "not there"
        raise UserError(
            f"{key} = {directory}: is {what} (seen from {Path.cwd()}), but must be an HF directory: correct {key}"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{key} = {directory}: has no config.json, so it is no HF model directory: point {key} at one "
            "(config.json, *.safetensors, tokenizer.json)"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({_one_line(error)}): fetch the model again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, but must be a JSON object: fetch the model again")
    return values


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def check_model_keys(config: Config, *, reads_text: bool = True) -> None:
    """Refuses a configuration that names no model, two models and, with ``reads_text``, no tokenizer or no prompts.

    Raises: UserError.
    """
    model = config.model
    if model.path is None and model.config is None:
        raise UserError("model.path and model.config are both null: set model.path to an HF directory")
    if model.path is not None and model.config is not None:
        raise UserError(
            f"model.path = {model.path} and model.config are both set, but exactly one may be: remove model.config to "
            "load those weights, or set model.path=null for random ones"
        )
    if not reads_text:
        return
    if model.config is not None and model.tokenizer is None:
        raise UserError("model.tokenizer is null, but a model of model.config has none of its own: set model.tokenizer")
    if config.data.prompts is None or config.data.prompts == []:
        raise UserError("data.prompts is null, but training needs prompts: set it to a JSONL or Parquet file")


def _check_layout(config: Config, world_size: int) -> None:
    parallel = config.parallel
    for axis, size, fix in (
        ("cp", parallel.cp, "use parallel.tp or parallel.recompute=full for long sequences"),
        ("ep", parallel.ep, "models with experts cannot be trained yet"),
    ):
        if size > 1:
            raise UserError(f"parallel.{axis} = {size} is not supported yet: set parallel.{axis}=1 ({fix})")
    ranks = parallel.tp * parallel.pp * parallel.cp
    if parallel.engine != "megatron" and ranks > 1:
        raise UserError(
            f"parallel.engine = {parallel.engine} cuts the model over all ranks, but parallel tp*pp = {parallel.tp}*"
            f"{parallel.pp}: set both to 1, or parallel.engine=megatron (rollout.tp is free)"
        )
    if world_size % ranks:
        raise UserError(
            f"parallel tp*pp*cp = {parallel.tp}*{parallel.pp}*{parallel.cp} = {ranks} must divide the number of ranks, "
            f"but that is {world_size}: {_ranks_fix(world_size, ranks)}"
        )
    rollout_tp = config.rollout.tp or parallel.tp
    if world_size % rollout_tp:
        raise UserError(
            f"rollout.tp = {rollout_tp} must divide the number of ranks, but that is {world_size}: "
            f"set rollout.tp to {_one_of(_divisors(world_size))}"
        )


def _ranks_fix(world_size: int, ranks: int) -> str:
    below, above = world_size // ranks * ranks, -(-world_size // ranks) * ranks
    numbers = f"{below} or {above}" if below else f"{above}"
    return f"run {numbers} ranks (launch.nproc), or set tp, pp so that their product divides {world_size}"


def _check_algorithm(config: Config) -> None:
    algorithm, data = config.algorithm, config.data
    sequences = data.prompts_per_step * config.rollout.samples_per_prompt
    if sequences % algorithm.mini_batches:
        raise UserError(
            f"algorithm.mini_batches = {algorithm.mini_batches} must divide the sequences of a step, "
            f"data.prompts_per_step * rollout.samples_per_prompt = {data.prompts_per_step} * "
            f"{config.rollout.samples_per_prompt} = {sequences}: set algorithm.mini_batches to "
            f"{_one_of(_divisors(sequences))}"
        )
    if config.reshard.snapshot != "none" and config.rollout.sleep_level == 2 and config.launch.device != "cpu":
        raise UserError(
            f"reshard.snapshot = {config.reshard.snapshot} sends changes only, but rollout.sleep_level = 2 throws the "
            "sampler's weights away: set rollout.sleep_level=1 or 0, or reshard.snapshot=none"
        )
    best = config.checkpoint.keep_best
    if best is not None and best.startswith("eval/") and not config.eval.every:
        raise UserError(
            f"checkpoint.keep_best = {best} is a metric of evaluations, but eval.every = 0 makes none: set eval.every"
        )
    for role, optimizer in (("actor", config.actor), ("critic", config.critic)):
        if optimizer.decay != "constant" and optimizer.min_lr > optimizer.lr:
            raise UserError(
                f"{role}.min_lr = {optimizer.min_lr} is above {role}.lr = {optimizer.lr}, but the rate decays from lr "
                f"to min_lr: set {role}.min_lr to at most {optimizer.lr}"
            )
        if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
            raise UserError(
                f"{role}.decay_steps = {optimizer.decay_steps} must be above {role}.warmup_steps = "
                f"{optimizer.warmup_steps}: the decay starts after the warm-up: raise decay_steps"
            )


def _check_fault(config: Config) -> None:
    for name, seconds in config.fault.phase_timeout_s.items():
        if name not in PHASES:
            raise UserError(
                f"fault.phase_timeout_s = {config.fault.phase_timeout_s}: {name} is no phase: use {join_or(list(PHASES))}"
            )
        if not seconds >= 0 or seconds == float("inf"):
            raise UserError(
                f"fault.phase_timeout_s = {config.fault.phase_timeout_s}: {name} must have seconds >= 0: set it to 0 for "
                "no limit"
            )
    limit, of_reward = config.fault.phase_timeout_s.get("reward", config.fault.timeout_s), config.reward.timeout_s
    if of_reward is not None and 0 < limit <= of_reward:
        raise UserError(
            f"reward.timeout_s = {of_reward} is not below {limit}, the seconds after which the watchdog ends the run "
            f"(fault.timeout_s, fault.phase_timeout_s.reward): set fault.phase_timeout_s.reward={2 * of_reward:g}"
        )


def _check_model_sizes(config: Config, hf: Mapping[str, Any]) -> None:
    tp, pp = config.parallel.tp, config.parallel.pp
    rollout_tp = config.rollout.tp or tp
    heads = _size(hf, "num_attention_heads")
    kv_heads = _size(hf, "num_key_value_heads", heads)
    for key, size in (("parallel.tp", tp), ("rollout.tp", rollout_tp)):
        _must_divide(key, size, "num_attention_heads", heads)
        _must_divide(key, size, "intermediate_size", _size(hf, "intermediate_size"))
        if kv_heads % size and size % kv_heads:
            raise UserError(
                f"{key} = {size} must divide the model's num_key_value_heads = {kv_heads}, or be a multiple of it: "
                f"set {key} to {_one_of(_divisors(kv_heads))}"
            )
    _must_divide("parallel.pp", pp, "num_hidden_layers", _size(hf, "num_hidden_layers"))
    _size(hf, "vocab_size"), _size(hf, "hidden_size")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    limit = hf.get("max_position_embeddings")
    if isinstance(limit, int) and longest > limit:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_response_tokens} = {longest}, but the model's max_position_embeddings is {limit}: "
            "lower one of the two"
        )
    if objective(config.algorithm.name) is None:
        _check_kv_cache(config, hf, longest)


def _check_kv_cache(config: Config, hf: Mapping[str, Any], longest: int) -> None:
    """Refuses a KV cache that cannot hold one sequence, which vLLM would not start with."""
    given, heads = config.rollout.kv_cache_bytes, _size(hf, "num_attention_heads")
    if given is None:
        return
    kv_heads = max(1, _size(hf, "num_key_value_heads", heads) // (config.rollout.tp or config.parallel.tp))
    head_dim = _size(hf, "head_dim", _size(hf, "hidden_size") // heads)
    token_bytes = 2 * _size(hf, "num_hidden_layers") * kv_heads * head_dim * (4 if config.model.dtype == "float32" else 2)
    if given >= longest * token_bytes:
        return
    block = config.rollout.block_size or _LARGEST_DEFAULT_BLOCK
    enough = (-(-longest // block) + 1) * block * token_bytes  # vLLM keeps one block for itself
    raise UserError(
        f"rollout.kv_cache_bytes = {given} holds {given // token_bytes} tokens, but must hold one sequence of "
        f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}: set it to {enough} or more, or lower one of "
        "the two"
    )


def _size(hf: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = hf.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            f"the model's config has {name} = {value!r}, but it must be a positive integer: set it in "
            "model.config, or fetch the model's config.json again"
        )
    return value


def _must_divide(key: str, size: int, name: str, whole: int) -> None:
    if whole % size:
        raise UserError(
            f"{key} = {size} must divide the model's {name} = {whole}: set {key} to {_one_of(_divisors(whole))}"
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _one_of(numbers: list[int]) -> str:
    """``1, 2 or 4``; a long list only by its first eight."""
    texts = [str(number) for number in numbers]
    return join_or(texts) if len(texts) <= 8 else ", ".join(texts[:8]) + ", ..."
