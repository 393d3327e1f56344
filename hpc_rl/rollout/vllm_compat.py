"""All that depends on vLLM's internals and its version (0.26 to 0.33): environment, start, stop, sampler.

The engine core is driven directly, without vLLM's front end: that front end would tokenize, detokenize, count and
copy each token in Python, and importing it takes a second.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hpc_rl.config import RolloutConfig
from hpc_rl.errors import UserError
from hpc_rl.rollout import vllm_cpu
from hpc_rl.rollout.vllm_guard import replaced


def prepare_environment(device: str) -> None:
    """Sets what vLLM reads from the environment; call before vLLM is imported. ``device``: cpu or cuda."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must run in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its messages go through the process's own handlers
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are directories here, never names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # that vLLM causes
    if device == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the launcher places threads
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_memory_bytes
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling tiny CPU functions costs 15 s and gains nothing
        if "torch._dynamo.config" in sys.modules:
            torch._dynamo.config.disable = True


def import_vllm(device: str) -> None:
    """Imports the modules that an engine needs."""
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor

    if device == "cpu":
        import vllm.v1.worker.cpu_worker  # noqa: F401


def engine_arguments(
    model_dir: str, config: RolloutConfig, *, dtype: str, max_model_len: int, tp: int, seed: int, device: str
) -> dict[str, Any]:
    """vLLM's engine arguments for a generation engine whose weights are written in place later."""
    values: dict[str, Any] = {
        "model": model_dir,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": tp,
        "distributed_executor_backend": "external_launcher",
        "seed": seed % 2**31,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": config.samples_per_prompt > 1,
        "enforce_eager": config.enforce_eager or device == "cpu",
        "disable_log_stats": True,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        # After a part of a prompt vLLM turns the request's generator back, which those of a CPU cannot.
        "enable_chunked_prefill": device != "cpu",
    }
    if config.block_size is not None:
        values["block_size"] = config.block_size
    if device == "cuda":
        values["gpu_memory_utilization"] = config.gpu_memory_utilization
        values["enable_sleep_mode"] = config.sleep_level > 0
        if not values["enforce_eager"]:
            # vLLM captures up to 512 sequences and runs larger batches kernel by kernel, at a third of the speed.
            values["max_cudagraph_capture_size"] = config.max_num_seqs
        values["moe_backend"] = "triton"  # reads experts in the layout that they are loaded in; others reorder them
    return values


def build_core(values: dict[str, Any], device: str, job: str, order: Sequence[int]) -> Any:
    """An EngineCore in this process, on the ranks of the initialised torch.distributed job.

    Args:
        values: engine arguments.
        device: ``cpu`` or ``cuda``.
        job: a name that no other job on this node uses, the same on every rank (CPU shared memory is named by it).
        order: all ranks, replica by replica; ascending within each.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore

    gc.freeze()  # vLLM collects garbage whenever it starts or stops: not among the objects of all those modules
    atexit.register(gc.unfreeze)  # frozen objects would outlive the interpreter, and their libraries complain
    on_cpu = device == "cpu"
    with _starting(order), vllm_cpu.starting() if on_cpu else nullcontext():
        try:
            vllm_config = EngineArgs(**values).create_engine_config(usage_context=UsageContext.LLM_CLASS)
            if on_cpu:
                vllm_cpu.check_model(vllm_config)
                vllm_cpu.size_kv_cache(vllm_config)
            core = EngineCore(vllm_config, _executor(job), log_stats=False)
        except UserError:
            raise
        except ValueError as error:  # vLLM's own checks of sizes
            raise UserError(_why_not(values, " ".join(str(error).split()), on_cpu)) from error
    vllm_cpu.unlink_shared_memory(job)
    _open_cores.append(core)
    return core


def _why_not(values: dict[str, Any], reason: str, on_cpu: bool) -> str:
    """One line on why vLLM did not start, in this project's keys where it is about the KV cache."""
    if "block size" in reason and values.get("block_size") is not None:
        return f"rollout.block_size = {values['block_size']} is refused by vLLM ({reason[:400]}): set it to null"
    if "KV cache" not in reason and "cache blocks" not in reason:
        return f"vLLM cannot start with {values['model']}: {reason[:400]}"
    fits = re.search(r"estimated maximum model length is (\d+)", reason)
    holds = f" holds {fits[1]} tokens, but" if fits else ""
    given = values["kv_cache_memory_bytes"]
    share = f"what rollout.gpu_memory_utilization = {values.get('gpu_memory_utilization')} leaves for the KV cache"
    cache, key = share, "rollout.gpu_memory_utilization"
    if on_cpu or given is not None:
        cache, key = f"rollout.kv_cache_bytes = {'null' if given is None else given}", "rollout.kv_cache_bytes"
    return (
        f"{cache}{holds} must hold one sequence of data.max_prompt_tokens + rollout.max_response_tokens = "
        f"{values['max_model_len']}: raise {key}, or lower one of the two"
    )


_open_cores: list[Any] = []  # of this process


@contextmanager
def _starting(order: Sequence[int]) -> Iterator[None]:
    """The time in which an engine starts, on any device."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.engine import core

    make_group = parallel_state.init_model_parallel_group

    def make_reordered(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        # vLLM groups neighbours, by the places of ranks in `order` here.
        groups = [[order[place] for place in places] for places in group_ranks]
        assert all(group == sorted(group) for group in groups), "torch sorts the ranks of a group"
        return make_group(groups, *args, **kwargs)

    no_queue = staticmethod(lambda *args, **kwargs: None)
    with (
        # What the engine holds must be freed by close; frozen objects would not be.
        replaced(core, "freeze_gc_heap", lambda: None),
        # A queue in shared memory, 24 MiB, for front ends in other processes; a killed job would leave it behind.
        replaced(MessageQueue, "create_from_process_group", no_queue),
        replaced(parallel_state, "init_model_parallel_group", make_reordered),
    ):
        yield


def _executor(job: str) -> Any:
    """vLLM's executor for jobs that another launcher started, on this process's rank and GPU."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Executor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            local_rank = torch.cuda.current_device() if torch.cuda.is_available() else 0
            return f"env://:{job}", dist.get_rank(), local_rank

    return Executor


def shut_down(core: Any) -> None:
    """Frees the engine and vLLM's process groups; EngineCore.shutdown would destroy the trainer's groups too."""
    from vllm.distributed import parallel_state

    with replaced(gc, "unfreeze", lambda: None):
        core.model_executor.shutdown()
    core.scheduler.shutdown()
    _open_cores.remove(core)
    if _open_cores:  # engines of one process share the groups
        return
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def live_model(core: Any) -> torch.nn.Module:
    """The model whose parameters the engine computes with."""
    return core.model_executor.driver_worker.worker.model_runner.get_model()


def new_request(request_id: str, prompt_ids: tuple[int, ...], params: Any) -> Any:
    """An EngineCoreRequest for token ids."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_ids),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def report_untruncated_log_probs(core: Any) -> None:
    """Makes the sampler report log_softmax(logits / T) over the whole vocabulary, before top-k and top-p cut it.

    vLLM's ``processed_logprobs`` are of the distribution after the cut, which a trainer cannot recompute. Only
    needed with top_p < 1 or top_k > 0: otherwise both are the same.
    """
    sampler = core.model_executor.driver_worker.worker.model_runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):  # model runner V1
        inner = sampler.topk_topp_sampler.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
            log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
            return inner(logits, generators, k, p)[0], log_probs

        sampler.topk_topp_sampler.forward = forward
    elif hasattr(sampler, "apply_sampling_params"):  # model runner V2
        sample = sampler.sample

        def sample_tempered(logits: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            tempered = sampler.apply_sampling_params(logits.clone(), *args, skip_top_k_top_p=True)
            return sample(logits, *args, **kwargs)[0], tempered

        sampler.sample = sample_tempered
    else:
        raise UserError(
            f"vLLM's sampler {type(sampler).__name__} is not known here, so log-probs under top_p or top_k would be "
            "of another distribution than the trainer's: set rollout.top_p=1 and rollout.top_k=-1"
        )
