"""The configuration: frozen, typed, checked once at the edge. `config_load.py` reads it from YAML and key=value."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_frozen = dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=False, allow_inf_nan=False))


def section(factory: Any) -> Any:
    """A field that holds a nested section with its defaults."""
    return Field(default_factory=factory)


@_frozen
class RunConfig:
    dir: str = Field("runs/default", description="run directory: config, metrics, checkpoints, rollouts, logs")


@_frozen
class ModelConfig:
    path: str | None = Field(None, description="HF directory (safetensors) of the actor; null: random weights of `config`")
    config: dict[str, Any] | None = Field(None, description="HF config values of a randomly initialised model (with `path` null)")
    tokenizer: str | None = Field(None, description="HF directory of the tokenizer; null: model.path")
    critic_path: str | None = Field(None, description="HF directory of the critic's backbone; null: model.path")
    reference_path: str | None = Field(None, description="HF directory of the reference policy; null: model.path")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of weights and activations; optimizer states are float32")


@_frozen
class ParallelConfig:
    tp: int = Field(1, ge=1, description="tensor-parallel size of training")
    pp: int = Field(1, ge=1, description="pipeline-parallel size of training")
    cp: int = Field(1, ge=1, description="context-parallel size of training")
    ep: int = Field(1, ge=1, description="expert-parallel size of training")
    engine: Literal["megatron", "fsdp2", "zero1", "zero2"] = Field("megatron", description="who trains: Megatron-core (tp, pp), or with all ranks data-parallel FSDP2 or DeepSpeed")
    sequence_parallel: bool = Field(True, description="shard activations between TP regions too (with tp > 1)")
    offload: bool = Field(False, description="training state to host memory while generating (GPU)")
    recompute: Literal["none", "full"] = Field("none", description="recompute activations in the backward pass")
    auto: bool = Field(False, description="`parallel: auto`: tp, pp, rollout.tp, offload and recompute as `hpc-rl plan` chooses them; lengths at most what the model holds")


@_frozen
class LaunchConfig:
    nproc: int = Field(1, ge=1, description="ranks of a node: those that `hpc-rl train` starts when no launcher did")
    nodes: int | None = Field(None, ge=1, description="nodes for `hpc-rl launch`; null: those of the Slurm job, or one")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where a GPU is there")
    threads: int = Field(1, ge=1, description="OpenMP threads of each local rank (CPU)")
    timeout_s: float = Field(1800.0, gt=0, description="longest wait of a collective before all ranks stop")


@_frozen
class DataConfig:
    prompts: str | list[str] | None = Field(None, description="JSONL or Parquet files of prompts")
    eval_prompts: str | list[str] | None = Field(None, description="held-out prompts, for `eval`")
    format: Literal["auto", "jsonl", "parquet"] = Field("auto", description="auto: by the file's suffix")
    prompts_per_step: int = Field(8, ge=1, description="prompts in one step, over all ranks")
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are `overlong`")
    overlong: Literal["drop", "cut"] = Field("drop", description="drop a long prompt, or cut its start; counted either way")
    chat_template: Literal["auto", "always", "never"] = Field("auto", description="auto: for `messages`, not for `text`")
    shuffle: bool = Field(True, description="new order each epoch, from the seed")
    oversample: float = Field(1.0, ge=1, description="prompts drawn for each one wanted; groups whose scores differ are kept first")
    reward_min: float | None = Field(None, description="leave out prompts whose last group scored less on average; null: off")
    reward_max: float | None = Field(None, description="leave out prompts whose last group scored more on average; null: off")
    reward_memory_epochs: int = Field(2, ge=1, description="epochs for which a prompt is left out")


@_frozen
class RolloutConfig:
    tp: int | None = Field(None, ge=1, description="tensor-parallel size of generation; null: parallel.tp")
    samples_per_prompt: int = Field(1, ge=1, description="responses per prompt (group size)")
    max_response_tokens: int = Field(512, ge=1, description="length limit of a response")
    temperature: float = Field(1.0, gt=0, le=2, description="of sampling, at most vLLM's 2; log-probs are of the tempered distribution")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling")
    top_k: int = Field(-1, description="-1: off")
    stop: list[str] = Field(default_factory=list, description="strings that end a response, beside EOS")
    max_num_seqs: int = Field(256, ge=1, description="sequences that vLLM runs at once, per replica")
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV cache per rank; null: by gpu_memory_utilization (GPU), 256 MiB (CPU)")
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1, description="share of the GPU that vLLM may use")
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    sleep_level: Literal[0, 1, 2] = Field(2, description="vLLM sleep level while training (GPU); 0: stays awake")
    block_size: int | None = Field(None, ge=1, description="tokens of a KV cache block; null: vLLM's choice")


@_frozen
class RewardConfig:
    function: str = Field("hpc_rl.reward.functions:exact_match", description="module:function, see README")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments handed to the function")
    timeout_s: float | None = Field(None, gt=0, description="longest time of one call: the function then runs in a process of its own, killed when it takes longer; null: in the rank, without a limit")
    on_error: Literal["fail", "score"] = Field("fail", description="an exception, a time-out or a non-finite score: stop the run, or use error_score")
    error_score: float = Field(0.0, description="score of a sample whose reward failed")


@_frozen
class AlgorithmConfig:
    name: str = Field("ppo", description="see hpc_rl/algo/registry.py")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE lambda")
    clip_low: float = Field(0.2, ge=0, description="ratio may fall to 1 - clip_low")
    clip_high: float = Field(0.2, ge=0, description="ratio may rise to 1 + clip_high")
    clip_dual: float | None = Field(None, gt=1, description="dual-clip bound for negative advantages; null: off")
    value_clip: float | None = Field(0.2, gt=0, description="value clip around the old values; null: off")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="how token losses become one loss, over global counts"
    )
    entropy_coef: float = Field(0.0, description="entropy bonus")
    whiten_advantages: bool = Field(True, description="advantages to mean 0, std 1 over the step's response tokens (GAE)")
    kl_placement: Literal["none", "reward", "loss"] = Field("reward", description="where the KL to the reference goes")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="KL estimator of the penalty")
    kl_coef: float = Field(0.001, ge=0, description="initial (or fixed) KL coefficient")
    kl_target: float | None = Field(None, gt=0, description="adaptive coefficient towards this KL; null: fixed")
    kl_horizon: int = Field(10000, ge=1, description="samples over which the adaptive coefficient moves")
    epochs: int = Field(1, ge=1, description="passes over the step's rollouts")
    mini_batches: int = Field(1, ge=1, description="optimizer steps per pass")
    micro_batch_tokens: int = Field(16384, ge=1, description="token budget of a micro-batch per rank")
    critic_warmup_steps: int = Field(0, ge=0, description="steps in which only the critic learns; fewer in a run of fewer steps")
    kl_straight_through: bool = Field(False, description="KL loss: value of its estimator, gradient of k2 (unbiased)")
    sapo_tau_positive: float = Field(1.0, gt=0, description="SAPO: gate temperature, positive advantages")
    sapo_tau_negative: float = Field(1.05, gt=0, description="SAPO: gate temperature, other advantages")
    refill_rounds: int = Field(0, ge=0, description="most times that groups of one outcome are replaced by new prompts (dynamic sampling)")
    max_staleness: int = Field(0, ge=0, description="most steps that the sampler's weights may be behind the actor's")
    overlong_buffer_tokens: int = Field(0, ge=0, description="DAPO: tokens before the length limit that cost reward; with algorithm.name=dapo a fifth of rollout.max_response_tokens")
    overlong_penalty: float = Field(1.0, ge=0, description="DAPO: reward lost at the limit, linear over the buffer")
    correction: Literal["none", "tis-token", "tis-sequence", "icepop-token", "icepop-sequence"] = Field(
        "none", description="loss weights trainer / sampler: at most the bound (tis), or 0 outside the bounds (icepop)"
    )
    correction_low: float = Field(0.5, ge=0, description="icepop: smaller ratios weigh 0")
    correction_high: float = Field(2.0, gt=0, description="tis: bound of the weight; icepop: larger ratios weigh 0")
    correction_normalize: bool = Field(False, description="divide the weights by their mean over the step")
    reject: Literal[
        "none", "token-k1", "token-k2", "token-k3", "seq-sum-k1", "seq-sum-k2", "seq-sum-k3",
        "seq-mean-k1", "seq-mean-k2", "seq-mean-k3", "seq-max-k2", "seq-max-k3",
    ] = Field("none", description="tokens or sequences to leave out; seq-mean-k1: geometric mean")  # fmt: skip
    reject_low: float = Field(0.5, ge=0, description="k1: smallest trainer / sampler ratio kept")
    reject_high: float = Field(2.0, gt=0, description="k1: largest ratio kept; k2, k3: largest divergence kept")
    beta: float = Field(0.1, gt=0, description="DPO, IPO: strength of the pull to the reference")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="DPO: share of the pairs that may be the wrong way round")
    reward_center: float = Field(0.0, ge=0, description="reward model: weight of (chosen + rejected)^2, which centres the rewards")


@_frozen
class EvalConfig:
    every: int = Field(0, ge=0, description="steps between evaluations on data.eval_prompts; 0: none while training")
    samples_per_prompt: int = Field(1, ge=1, description="responses per held-out prompt; pass@k for k = 1, 2, 4, ... up to it")
    temperature: float = Field(0.0, ge=0, le=2, description="of these responses; 0: greedy")
    num_prompts: int | None = Field(None, ge=1, description="the first so many held-out prompts; null: all")
    pass_score: float = Field(1.0, description="a response passes with this score or more")


@_frozen
class OptimizerConfig:
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="at the end of the decay")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up, in optimizer steps")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape of the learning rate")
    decay_steps: int | None = Field(None, ge=1, description="optimizer steps of the decay; null: the whole run (a resume with more `steps` stretches it)")
    weight_decay: float = Field(0.0, ge=0, description="AdamW, not on norms and biases")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW")
    eps: float = Field(1e-8, gt=0, description="AdamW")
    clip_grad: float = Field(1.0, ge=0, description="global gradient norm; 0: no clipping")


@_frozen
class ReshardConfig:
    bucket_bytes: int = Field(256 << 20, ge=1 << 10, description="size of one transfer bucket; two are in flight")
    verify: Literal["always", "first", "off"] = Field("first", description="compare digests of vLLM's and the trainer's weights")
    snapshot: Literal["gpu", "host", "none"] = Field("none", description="copy of the last sent weights, for sparse deltas")


@_frozen
class CheckpointConfig:
    every: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_last: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_every: int = Field(0, ge=0, description="also keep those whose step is a multiple; 0: none")
    asynchronous: bool = Field(True, description="write in the background")
    rollouts: bool = Field(True, description="keep every rollout in RUN/rollouts")
    keep_best: str | None = Field(None, description="also keep the checkpoint with the highest value of this metric")
    on_error: Literal["stop", "continue"] = Field("stop", description="a failed write: stop the run, or warn and go on")


@_frozen
class StorageConfig:
    files_per_node: int = Field(0, ge=0, description="shard files per node; 0: one per rank")
    alignment_bytes: int = Field(1 << 20, ge=4096, description="datasets of a large shard file begin at multiples of this")
    page_bytes: int = Field(0, ge=0, description="HDF5 page size of index.h5; 0: no paging")
    direct_io: bool = Field(True, description="bypass the page cache where the file system can")
    stripe_count: int = Field(-1, ge=-1, description="Lustre stripes of a shard file (lfs setstripe -c); -1: all")
    stage_dir: str | None = Field(None, description="node-local directory: shards go there first, then to the run in the background")
    driver: Literal["posix", "mpio"] = Field("posix", description="mpio: one shared shard file through parallel HDF5")


@_frozen
class FaultConfig:
    timeout_s: float = Field(1200.0, ge=0, description="longest silence of a rank within a phase (start, load, save, end: three times that); 0: no watchdog")
    phase_timeout_s: dict[str, float] = Field(default_factory=dict, description="phase: seconds, in place of timeout_s")


@_frozen
class MetricsConfig:
    progress: bool = Field(True, description="progress bar on rank 0 (a terminal only)")
    tensorboard: bool = Field(False, description="also write TensorBoard events to RUN/logs/tensorboard")
    prometheus_port: int | None = Field(None, ge=1, le=65535, description="serve metrics on this port of rank 0")


@_frozen
class JobConfig:
    spares: int = Field(0, ge=0, description="nodes of the Slurm job that stand by until another fails")
    max_restarts: int = Field(3, ge=0, description="restarts in a row without a newer checkpoint, before the job gives up")
    backoff_s: float = Field(5.0, ge=0, description="wait before the second restart in a row; doubled for each further one")
    save_before_s: float = Field(300.0, gt=0, description="how long before the time limit ranks save; a step's own time comes on top")
    next_slice: Literal["requeue", "chain"] = Field("requeue", description="then: back into the queue, or another job after this one")
    scale: Literal["fixed", "auto"] = Field("fixed", description="auto: nodes of the next slice by the queue and measured efficiency")
    min_nodes: int = Field(1, ge=1, description="fewest nodes to work on, after losses or with scale=auto")
    max_nodes: int | None = Field(None, ge=1, description="most nodes of scale=auto; null: those that the job was submitted with")


@_frozen
class Config:
    """One run. Every leaf can be set in the YAML file or as ``section.key=value`` on the command line."""

    steps: int = Field(100, ge=1, description="training steps")
    seed: int = Field(0, ge=0, le=2**40, description="of everything random in the run")
    resume: str = Field("none", description="none, auto (newest whole checkpoint of run.dir, if any), or a checkpoint directory")
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    launch: LaunchConfig = section(LaunchConfig)
    data: DataConfig = section(DataConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    eval: EvalConfig = section(EvalConfig)
    actor: OptimizerConfig = section(OptimizerConfig)
    critic: OptimizerConfig = section(OptimizerConfig)
    reshard: ReshardConfig = section(ReshardConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    storage: StorageConfig = section(StorageConfig)
    fault: FaultConfig = section(FaultConfig)
    metrics: MetricsConfig = section(MetricsConfig)
    job: JobConfig = section(JobConfig)
