"""Loss and gradient of every algorithm, aggregation and objective on one layout, held against those of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpc_rl.algo.registry import ALGORITHMS, OBJECTIVES
from hpc_rl.algo.step import mini_batches, policy_loss, prepare, value_loss
from hpc_rl.algo.supervised import supervised_loss, with_weights
from hpc_rl.batch import Batch, cumulative
from hpc_rl.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
from hpc_rl.engine.make import Engine, make_engine
from hpc_rl.engine.protocol import LossFn
from hpc_rl.parallel import state as parallel_state
from hpc_rl.parallel.collectives import gather_objects
from hpc_rl.tensors.canonical import VALUE_HEAD, ModelSpec
from hpc_rl.tensors.shardmap import view
from tests.engine.layouts import fill

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
VOCAB = 50
# With beta1 = 0 Adam's first moment is the gradient, and this rate leaves every float32 weight as it is.
GRADIENT_ONLY = OptimizerConfig(lr=1e-30, beta1=0.0, clip_grad=0.0)
MODEL = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One loss. ``aggregation`` None: the algorithm's own. ``values``: what else is set, above what all have."""

    name: str
    aggregation: str | None = None
    role: str = "actor"
    values: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        values = (f"{key}={value}" for key, value in self.values)
        return "/".join(filter(None, (self.name, self.aggregation, self.role, *values)))


def also(name: str, role: str = "actor", **values: Any) -> Case:
    return Case(name, role=role, values=tuple(values.items()))


CASES = (
    *(Case(name, aggregation) for name in (*ALGORITHMS, "sft") for aggregation in AGGREGATIONS),
    Case("dpo"),
    Case("ipo"),
    Case("ppo", role="critic"),
    Case("reward_model", role="critic"),
    also("grpo", reject="seq-max-k3", reject_high=0.02),
    also("dr_grpo", reject="seq-mean-k1", reject_low=0.95, reject_high=1.05),
    also("dapo", reject="token-k1", reject_low=0.9, reject_high=1.1),
    also("grpo", correction="icepop-token", correction_low=0.9, correction_high=1.1),
    also("grpo", correction="icepop-sequence", correction_low=0.8, correction_high=1.25),
    also("grpo", correction="tis-token", correction_high=1.05, correction_normalize=True),
    also("ppo", kl_placement="reward", kl_estimator="k1"),
    also("rloo", kl_placement="reward", kl_estimator="k3"),
    also("ppo", role="critic", kl_placement="reward", kl_estimator="k2"),
    also("reinforce_plus_plus_baseline", kl_estimator="k2"),
    also("grpo", kl_estimator="k1", kl_straight_through=True),
    also("ppo", clip_dual=1.1),
)


def config_of(budget: int = 1000, **parallel: Any) -> Config:
    return Config(
        model=ModelConfig(dtype="float32", config={}),
        parallel=ParallelConfig(**parallel),
        rollout=RolloutConfig(samples_per_prompt=4, max_response_tokens=16),
        algorithm=AlgorithmConfig(micro_batch_tokens=budget),
        actor=GRADIENT_ONLY,
        critic=GRADIENT_ONLY,
    )


def with_case(config: Config, case: Case) -> Config:
    """The case's algorithm, with entropy, a KL to the reference, an overlong penalty and a correction where they fit."""
    values: dict[str, Any] = {"name": case.name, "micro_batch_tokens": config.algorithm.micro_batch_tokens}
    chosen = OBJECTIVES[case.name] if case.name in OBJECTIVES else ALGORITHMS[case.name]
    values |= chosen.defaults
    if case.name in ALGORITHMS:
        values |= {"entropy_coef": 0.01, "overlong_buffer_tokens": 8, "correction": "tis-sequence"}
        values |= {"kl_placement": "loss", "kl_estimator": "k3", "kl_coef": 0.1}
    if case.aggregation is not None:
        values["aggregation"] = case.aggregation
    values |= dict(case.values)
    return replace(config, algorithm=AlgorithmConfig(**values))  # type: ignore[type-var]  # a dataclass of pydantic


def rollouts(num_groups: int = 3) -> Batch:
    """Groups of four ragged sequences; one response is empty, one group has one outcome."""
    g = torch.Generator().manual_seed(11)
    num_sequences = 4 * num_groups
    prompts = torch.randint(2, 6, (num_sequences,), generator=g)
    responses = torch.randint(1, 13, (num_sequences,), generator=g)
    responses[1] = 0
    lengths = prompts + responses
    cu_seqlens, n = cumulative(lengths), int(lengths.sum())
    position_ids = torch.arange(n) - cu_seqlens[:-1].repeat_interleave(lengths)
    mask = position_ids >= prompts.repeat_interleave(lengths)
    scores = torch.randn(num_sequences, generator=g)
    scores[-4:] = 1.0
    at_end = torch.zeros(n)
    has_response = responses > 0
    at_end[cu_seqlens[1:][has_response] - 1] = scores[has_response]
    tokens = {
        "input_ids": torch.randint(0, VOCAB, (n,), generator=g),
        "position_ids": position_ids,
        "response_mask": mask,
        "token_level_scores": at_end,
        "noise": torch.randn(3, n, generator=g).T.contiguous(),
        "values": torch.randn(n, generator=g),
    }
    ids = torch.arange(num_sequences)
    sequences = {"group_ids": ids // 4, "prompt_ids": ids // 4, "scores": scores, "pair_ids": ids // 2}
    return Batch(cu_seqlens, tokens, {**sequences, "baseline_scores": torch.randn(num_sequences, generator=g)})


def with_log_probs(batch: Batch, log_probs: Tensor) -> Batch:
    """Old, reference and sampler's log-probs around the model's own, so that some ratios are clipped and none explode."""
    noise = batch["noise"]
    old = torch.where(batch["response_mask"], log_probs + 0.3 * noise[:, 0], 0.0)
    others = {"ref_log_probs": old + 0.3 * noise[:, 1], "rollout_log_probs": old + 0.1 * noise[:, 2]}
    return batch.with_tokens(old_log_probs=old, **others)


@dataclass
class Expected:
    """Of one rank: a weight for each canonical name, the batch, and per case loss and gradient by canonical name.

    ``scales``: sum of what each sequence (or pair) adds to the loss, in absolute value; the loss itself may cancel to 0.
    """

    initial: dict[str, Tensor]
    batch: Batch
    losses: dict[str, float]
    scales: dict[str, float]
    gradients: dict[str, dict[str, Tensor]]


def initial_weights() -> dict[str, Tensor]:
    """Random weights of an actor, and a value head."""
    g = torch.Generator().manual_seed(5)
    spec = ModelSpec.from_hf_config(MODEL)
    shapes = {**spec.tensors(), VALUE_HEAD: (1, spec.hidden_size)}
    return {
        name: torch.randn(shape, generator=g) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


class World:
    """Both engines of one layout, and the gradients that they give."""

    def __init__(self, config: Config, initial: dict[str, Tensor]) -> None:
        self.config = config
        state = parallel_state.initialize(config, torch.device("cpu"))
        spec = ModelSpec.from_hf_config(MODEL)
        self.engines = {
            role: make_engine(role, spec, config, state, optimizer=GRADIENT_ONLY) for role in ("actor", "critic")
        }
        for engine in self.engines.values():
            fill(engine, initial)

    def gradient(self, case: Case, batch: Batch) -> tuple[float, Iterator[tuple[str, tuple[slice, ...], Tensor]]]:
        """Loss, and this rank's pieces of its gradient: (canonical name, box, values)."""
        engine, config = self.engines[case.role], with_case(self.config, case)
        mini, loss_fn = prepared(case, batch, config)
        loss = engine.train_batch(mini, loss_fn)["loss"]
        shard_map, tensors, _ = engine.state()

        def pieces() -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
            for piece in shard_map.pieces:
                kind, _, name = piece.name.partition("/")
                if kind == "exp_avg":
                    box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                    yield name, box, view(piece, tensors[piece.local])

        return loss, pieces()


def prepared(case: Case, batch: Batch, config: Config) -> tuple[Batch, LossFn]:
    """One mini-batch of all sequences, and its loss."""
    if case.name in OBJECTIVES:
        if case.name == "sft":
            batch = Batch(batch.cu_seqlens, batch.tokens, {"prompt_ids": batch["prompt_ids"]})
        return with_weights(batch, config), supervised_loss(config)
    batch, _ = prepare(batch, config, config.algorithm.kl_coef)
    batch = Batch(batch.cu_seqlens, batch.tokens, {k: v for k, v in batch.sequences.items() if k != "pair_ids"})
    (mini,) = mini_batches(batch, config, torch.Generator().manual_seed(0))
    return mini, value_loss(config) if case.role == "critic" else policy_loss(config, config.algorithm.kl_coef)


def scale(engine: Engine, mini: Batch, loss_fn: LossFn) -> float:
    """Sum over sequences, or pairs, of |their part of the loss|."""
    mini = mini.with_tokens(**{f"output/{name}": value for name, value in engine.forward(mini).items()})
    together, total = 2 if "pair_ids" in mini else 1, 0.0
    for first in range(0, len(mini), together):
        part = mini.select(range(first, first + together))
        outputs = {name[7:]: value for name, value in part.tokens.items() if name.startswith("output/")}
        total += abs(float(loss_fn(outputs, part)[0]))
    return total


def expect() -> Expected:
    """All cases on one rank, in one micro-batch."""
    initial, batch = initial_weights(), rollouts()
    world = World(config_of(), initial)
    batch = with_log_probs(batch, world.engines["actor"].forward(batch)["log_probs"])
    losses: dict[str, float] = {}
    scales: dict[str, float] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for case in CASES:
        scales[case.label] = scale(world.engines[case.role], *prepared(case, batch, with_case(world.config, case)))
        losses[case.label], pieces = world.gradient(case, batch)
        whole = gradients[case.label] = {}
        for name, box, values in pieces:
            whole.setdefault(name, torch.full(initial[name].shape, torch.nan))[box] = values
    parallel_state.destroy()
    return Expected(initial, batch, losses, scales, gradients)


def differences(expected: Expected, config: Config, reverse: bool = False) -> dict[str, tuple[float, float]]:
    """Per case: error of the loss to its scale, and of the gradient (|g - g1| / |g1| over all weights), at this layout.

    ``reverse``: the sequences in another order (pairs stay together).
    """
    world = World(config, expected.initial)
    batch = expected.batch
    if reverse:
        batch = batch.select([i + k for i in range(len(batch) - 2, -1, -2) for k in (0, 1)])
    found = {}
    for case in CASES:
        loss, pieces = world.gradient(case, batch)
        reference = expected.gradients[case.label]
        wrong, covered = 0.0, 0
        for name, box, values in pieces:
            wrong += float((values - reference[name][box]).double().square().sum())
            covered += values.numel()
        squares = sum(float(value.double().square().sum()) for value in reference.values())
        everywhere = gather_objects((wrong, covered))
        assert sum(n for _, n in everywhere) >= sum(value.numel() for value in reference.values()), (
            "a part is on no rank"
        )
        error = abs(loss - expected.losses[case.label]) / expected.scales[case.label]
        found[case.label] = (error, (sum(w for w, _ in everywhere) / squares) ** 0.5)
    parallel_state.destroy()
    return found
