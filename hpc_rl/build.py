"""From a configuration to the parts of a job: ranks, models, sampler, storage. Everything heavy starts here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_rl import rng, run_dir
from hpc_rl.algo.registry import algorithm, objective
from hpc_rl.config import Config
from hpc_rl.config_check import cross_check, read_hf_config, read_hf_config_file
from hpc_rl.data.prompts import PromptSet, PromptStream
from hpc_rl.data.tokenizer import load_tokenizer, tokenizer_path
from hpc_rl.engine.colocate import Colocation
from hpc_rl.engine.make import Engine, make_engine
from hpc_rl.errors import UserError
from hpc_rl.fault.phase import beat
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import agree
from hpc_rl.parallel.state import ParallelState
from hpc_rl.preflight_resume import checkpoint_to_resume
from hpc_rl.reshard.cache import PlanCache
from hpc_rl.reshard.connect import connect
from hpc_rl.reshard.execute import Resharder
from hpc_rl.reward.score import RewardFunction
from hpc_rl.rollout.vllm import VLLMEngine
from hpc_rl.run_dir import say
from hpc_rl.run_lock import prepare_run_dir, release_run_dir
from hpc_rl.storage import manifest
from hpc_rl.storage.checkpoint import Checkpointer
from hpc_rl.storage.identity import check_identity, tokenizer_digest
from hpc_rl.tensors.canonical import VALUE_HEAD, ModelSpec
from hpc_rl.tensors.hf import check_names, load_into, open_hf
from hpc_rl.tensors.random_init import fill_random
from launch.env import RankInfo, detect, export_torch_env
from launch.nodes import check_nodes


@dataclass
class Job:
    """The parts of one run on this rank. ``critic`` and ``reference`` are None where nothing needs them."""

    parallel: ParallelState
    prompts: PromptStream
    actor: Engine
    critic: Engine | None
    reference: Engine | None
    sampler: VLLMEngine
    reward: RewardFunction
    tokenizer: Any
    resharder: Resharder
    colocation: Colocation
    checkpointer: Checkpointer
    resume_from: Path | None

    @property
    def trained(self) -> dict[str, Engine]:
        """Role -> engine, of those that learn."""
        return {e.role: e for e in (self.actor, self.critic) if e is not None}

    def close(self) -> None:
        """Waits for the write in flight, ends the sampler and the reward's process, leaves the process group."""
        self.checkpointer.close()
        self.sampler.close()
        self.reward.close()
        parallel_state.destroy()
        release_run_dir()


def build(config: Config) -> Job:
    """Joins the job and builds everything; every rank calls it at the same time.

    Raises: UserError on every rank, before any model is built, for what does not fit.
    """
    with undo_on_error() as undo:
        tokenizer = load_tokenizer(config)
        reward = RewardFunction.from_config(config.reward)
        undo.callback(reward.close)
        prompts = PromptSet.from_config(config, tokenizer, reward.required_fields)
        stream = PromptStream(prompts, config.seed, config.data.shuffle, config.data.prompts_per_step)
        parallel = join(config, stream)
        _check_sleep(config, parallel)
        if parallel.rank == 0:
            say(f"Prompts: {prompts.summary()}")
        actor = build_engine("actor", config, parallel)
        critic = build_engine("critic", config, parallel) if needs_critic(config) else None
        reference = build_engine("reference", config, parallel) if needs_reference(config) else None
        sampler = build_sampler(config, parallel, tokenizer)
        undo.callback(sampler.close)
        checkpointer = build_checkpointer(config, parallel)
        resharder = connect(
            actor.shard_map(),
            sampler.shard_map(),
            config=config.reshard,
            cache=PlanCache(Path(config.run.dir) / "plans"),
            node_size=parallel.node_size,
            timeout_s=config.launch.timeout_s,
        )
        colocation = Colocation(sampler, [e for e in (actor, critic, reference) if e], offload=config.parallel.offload)
        resume_from = find_checkpoint(config, checkpointer)
        return Job(
            parallel, stream, actor, critic, reference, sampler, reward, tokenizer, resharder, colocation, checkpointer,
            resume_from,
        )  # fmt: skip


@contextmanager
def undo_on_error() -> Iterator[ExitStack]:
    """Gives back what a failed start took: the run directory, and in a job of one rank, which may try again, the rest.

    Ranks of a larger job end with their error: others may wait in a collective that a tear-down would wait for too.
    """
    undo = ExitStack()
    undo.callback(parallel_state.destroy)
    try:
        yield undo
    except BaseException:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            undo.close()
        release_run_dir()
        raise


def _check_sleep(config: Config, parallel: ParallelState) -> None:
    if parallel.device.type == "cuda" and config.rollout.sleep_level == 2 and config.reshard.snapshot != "none":
        raise UserError(
            f"reshard.snapshot = {config.reshard.snapshot} has no effect with rollout.sleep_level = 2, which gives vLLM's "
            "weights away each step, so that all of them travel: set rollout.sleep_level to 0 or 1, or reshard.snapshot=none"
        )


def join(config: Config, prompts: PromptStream | None) -> ParallelState:
    """Takes this process's place in the job that the launcher began, and prepares the run directory if a run begins.

    Args: prompts: of the run that begins; None: none does.
    Raises: UserError for sizes that do not fit the world, before any model is built.
    """
    info = detect()
    hf_config = read_hf_config(config)
    cross_check(config, info.world_size, hf_config)
    export_torch_env(info)
    parallel = parallel_state.initialize(config, choose_device(config, info), info.local_world_size)
    rng.seed_all(config.seed, parallel.rank)
    if prompts is not None:
        check_goes_on(config, prompts)  # first: a refused resume leaves the run as it was
        prepare_run_dir(config, hf_config, parallel, info.launcher)
    if info.num_nodes > 1:
        check_nodes(info, config, config.run.dir)
    if prompts is not None and parallel.rank == 0:
        say(run_dir.model_line(config, hf_config, info.world_size, parallel.device.type))
    return parallel


def build_engine(role: str, config: Config, parallel: ParallelState) -> Engine:
    """The actor, the critic or the reference, with its weights read or drawn."""
    model = config.model
    paths = {"actor": model.path, "critic": model.critic_path, "reference": model.reference_path}
    beat()
    optimizers = {"actor": config.actor, "critic": config.critic, "reference": None}
    path = paths[role] or model.path
    own = path is not None and path != model.path
    hf_config = read_hf_config_file(f"model.{role}_path", str(path)) if own else read_hf_config(config)
    engine = make_engine(
        role,
        ModelSpec.from_hf_config(hf_config),
        config,
        parallel,
        optimizer=optimizers[role],
        total_steps=config.steps * config.algorithm.epochs * config.algorithm.mini_batches,
    )
    error: BaseException | None = None
    try:
        if path is None:
            fill_random(*engine.shard_map(), engine.spec, config.seed)
        else:
            directory, optional = open_hf(path), (VALUE_HEAD,) if role == "critic" else ()
            check_names(directory, engine.spec, optional)
            load_into(*engine.shard_map(), directory, optional)
    except Exception as caught:  # the other ranks wait in `agree` to hear of it
        error = caught
    agree(error)
    engine.parameters_changed()
    return engine


def build_checkpointer(config: Config, parallel: ParallelState) -> Checkpointer:
    """Saves and loads for all ranks."""
    return Checkpointer(
        config.run.dir,
        config.checkpoint,
        rank=parallel.rank,
        world_size=parallel.layout.world_size,
        group=dist.group.WORLD,
        storage=config.storage,
    )


def build_sampler(
    config: Config, parallel: ParallelState, tokenizer: Any = None, model_dir: Path | None = None
) -> VLLMEngine:
    """The rollout engine; its weights are undefined until the first sync. ``model_dir``: where config.json is."""
    beat()
    return VLLMEngine(
        str(model_dir or config.model.path or Path(config.run.dir) / "model"),
        config.rollout,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        tp=config.rollout.tp or config.parallel.tp,
        seed=config.seed,
        device=parallel.device.type,
        tokenizer=tokenizer,
        train_tp=config.parallel.tp,
    )


def needs_critic(config: Config) -> bool:
    return algorithm(config.algorithm.name).needs_critic


def needs_reference(config: Config) -> bool:
    goal = objective(config.algorithm.name)
    return config.algorithm.kl_placement != "none" if goal is None else goal.needs_reference


def choose_device(config: Config, info: RankInfo) -> torch.device:
    """The device of this rank. Raises UserError if a GPU is asked for and none is there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.launch.device == "cpu" or (config.launch.device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise UserError(
            "launch.device is cuda, but torch sees no GPU: set launch.device=cpu, or use a CUDA build of torch"
        )
    if info.local_rank >= count:
        raise UserError(
            f"local rank {info.local_rank} has no GPU, this node has {count}: start at most {count} ranks on a node"
        )
    return torch.device("cuda", info.local_rank)


def check_goes_on(config: Config, prompts: PromptStream) -> None:
    """Refuses a checkpoint of another tokenizer, of other prompts or of another order of them. Raises UserError."""
    path = checkpoint_to_resume(config)
    if path is None:
        return
    extra = manifest.read(path).extra
    check_identity(extra, path, tokenizer=tokenizer_digest(tokenizer_path(config)[1]))
    prompts.check_state(extra["prompts"])


def find_checkpoint(config: Config, checkpointer: Checkpointer) -> Path | None:
    """The checkpoint that ``resume`` names, or None for a fresh start; says the latter. It may prove damaged."""
    found = named_checkpoint(config, checkpointer)
    if checkpointer.rank == 0 and found is None:
        say(run_dir.resume_line(config, found))
    return found


def named_checkpoint(config: Config, checkpointer: Checkpointer) -> Path | None:
    """As `find_checkpoint`, without a word."""
    if config.resume == "auto":
        return checkpointer.latest()
    return None if config.resume == "none" else Path(config.resume)
