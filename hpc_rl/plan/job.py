"""What is planned: a configuration on so many GPUs, checked as a run would check it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_rl.algo import registry
from hpc_rl.config import Config
from hpc_rl.config_check import cross_check, read_hf_config
from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout
from hpc_rl.plan.hardware import Gpu
from hpc_rl.plan.published import model_config, published_name
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.dtypes import ITEM_BYTES
from hpc_rl.tensors.megatron_map import check_megatron_layout, padded_vocab_size
from hpc_rl.tensors.vllm_map import vllm_shard_map

MAX_RANKS = 65536


@dataclass(frozen=True)
class PlannedJob:
    """A run on ``nodes`` x ``gpus_per_node`` ranks.

    ``model``: of model.path, an actor. ``trained``: role -> model, of those that learn. ``reference``: None where
    nothing needs it. ``goal``: None for an algorithm with rollouts.
    """

    config: Config
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    layout: Layout
    model: ModelSpec
    trained: Mapping[str, ModelSpec]
    reference: ModelSpec | None
    goal: registry.Objective | None

    @property
    def has_rollouts(self) -> bool:
        return self.goal is None

    @property
    def on_cpu(self) -> bool:
        return self.gpu.name == "cpu"

    @property
    def generation_tp(self) -> int:
        return self.config.rollout.tp or self.config.parallel.tp

    @property
    def num_replicas(self) -> int:
        """Generation replicas."""
        return self.layout.world_size // self.generation_tp

    @property
    def item_bytes(self) -> int:
        """Of a weight or an activation."""
        return ITEM_BYTES[self.config.model.dtype]

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences that one step learns from, over all ranks."""
        per_line = self.config.rollout.samples_per_prompt if self.goal is None else len(self.goal.fields)
        return self.config.data.prompts_per_step * per_line

    @property
    def generated_sequences(self) -> int:
        """Sequences of a step's first round of sampling, over all replicas."""
        prompts = math.ceil(self.config.data.prompts_per_step * self.config.data.oversample)
        greedy = registry.algorithm(self.config.algorithm.name).needs_greedy
        return prompts * (self.config.rollout.samples_per_prompt + greedy)

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of a pass over a step's sequences."""
        return 1 if self.goal else min(self.config.algorithm.mini_batches, self.num_sequences)

    @property
    def assumed(self) -> dict[str, str]:
        """Key -> published model whose sizes were taken, because the directory is not there."""
        paths = {f"model.{key}": getattr(self.config.model, key) for key in ("path", "critic_path", "reference_path")}
        names = {key: published_name(path) for key, path in paths.items() if path is not None}
        return {key: name for key, name in names.items() if name is not None}

    @property
    def epochs(self) -> int:
        """Passes over a step's sequences."""
        return 1 if self.goal else self.config.algorithm.epochs

    @property
    def mini_batch_sequences(self) -> int:
        """Sequences of the largest optimizer step."""
        return -(-self.num_sequences // self.mini_batches)

    @property
    def roles(self) -> dict[str, ModelSpec]:
        """Role -> model, of all that the trainer holds."""
        return {**self.trained, **({"reference": self.reference} if self.reference else {})}

    @property
    def scored(self) -> dict[str, ModelSpec]:
        """Role -> model, of those that see a step's sequences before anything is learned from them."""
        if self.goal:
            return {role: spec for role, spec in self.roles.items() if role == "reference"}
        needs_actor = registry.needs_old_log_probs(self.config)
        return {role: spec for role, spec in self.roles.items() if role != "actor" or needs_actor}

    def micro_batch_tokens(self, num_sequences: int) -> int:
        """Most tokens of one rank's micro-batch when ``num_sequences`` of full length are dealt over DP."""
        per_rank = -(-num_sequences // self.layout.dp)
        budget = max(self.config.algorithm.micro_batch_tokens, self.longest)
        tokens = min(budget, per_rank * self.longest)
        multiple = self.layout.tp if self.sequence_parallel else 1
        return -(-tokens // multiple) * multiple

    @property
    def sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel and self.layout.tp > 1


def plan_job(config: Config, gpu: Gpu, nodes: int, gpus_per_node: int) -> PlannedJob:
    """The job of ``config`` on that many GPUs.

    Raises:
        UserError: all that a run would refuse before it builds a model, tokenizer, prompts and weights apart.
    """
    for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if value < 1:
            raise UserError(f"{option} = {value}: must be at least 1")
    world_size, parallel = nodes * gpus_per_node, config.parallel
    if world_size > MAX_RANKS:
        raise UserError(f"--nodes {nodes} x --gpus-per-node {gpus_per_node} = {world_size} ranks: at most {MAX_RANKS} are planned")
    path = config.model.path
    hf_config = read_hf_config(config) if path is None else model_config("model.path", path)
    cross_check(config, world_size, hf_config, reads_text=False)
    layout = Layout(world_size, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, ep=parallel.ep)
    model, goal = ModelSpec.from_hf_config(hf_config), registry.objective(config.algorithm.name)
    if goal is None:
        trained = {"actor": model}
        if registry.algorithm(config.algorithm.name).needs_critic:
            trained["critic"] = _other(config, model, "critic").with_role("critic")
        needs_reference = config.algorithm.kl_placement != "none"
    else:
        trained, needs_reference = {goal.role: model.with_role(goal.role)}, goal.needs_reference
    reference = _other(config, model, "reference") if needs_reference else None
    job = PlannedJob(config, gpu, nodes, gpus_per_node, layout, model, trained, reference, goal)
    for spec in job.roles.values():
        _check_model(spec, layout)
    if job.has_rollouts:
        vllm_shard_map(model, job.generation_tp, 0, config.model.dtype)
    return job


def _other(config: Config, model: ModelSpec, role: str) -> ModelSpec:
    """The model of the critic or the reference: model.path's unless it has a directory of its own."""
    key = f"{role}_path"
    path = getattr(config.model, key)
    if path is None or path == config.model.path:
        return model
    return ModelSpec.from_hf_config(model_config(f"model.{key}", path))


def _check_model(spec: ModelSpec, layout: Layout) -> None:
    """Refuses what the training engine cannot hold or cut. Raises UserError."""
    if spec.moe_layers:
        raise UserError(f"model_type {spec.model_type} has experts, which cannot be trained yet: use a dense model")
    check_megatron_layout(spec, layout, padded_vocab_size(spec.vocab_size, layout.tp))
    layout.layers_of(0, spec.num_layers)
