"""Generation with vLLM in the trainer's own processes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hpc_rl.config import RolloutConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.fault.phase import beat
from hpc_rl.rollout import vllm_compat as compat
from hpc_rl.rollout.protocol import Request, Sample
from hpc_rl.rollout.stopping import StopStrings
from hpc_rl.rollout.vllm_guard import GUARD
from hpc_rl.rollout.vllm_map import live_shard_map, zero_uncovered
from hpc_rl.tensors.shardmap import ShardMap


@dataclass(slots=True)
class _Running:
    """What is known of a response so far."""

    request: Request
    index: int  # in the list of requests
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    begin_s: float = 0.0  # of the step that sampled the first token


class VLLMEngine:
    """A vLLM replica on ``tp`` consecutive ranks of the torch.distributed job; world size / tp replicas in all.

    Every rank constructs it at the same time. Its weights are undefined until all of them were written through
    ``shard_map()``, followed by ``set_version``. Log-probs of samples are those of log_softmax(logits / temperature)
    over the whole vocabulary, also when top_p or top_k restrict what can be sampled.

    Args:
        model_dir: directory with ``config.json``; weights in it are not read.
        config: sampling and memory.
        dtype: ``float32`` or ``bfloat16``, of weights and activations.
        max_model_len: longest prompt plus response, in tokens.
        tp: tensor-parallel size of generation; must divide the world size.
        seed: of vLLM's own generators, which no request uses.
        device: ``cpu`` or ``cuda``.
        tokenizer: decodes responses and names the EOS token; None: empty texts, EOS from ``config.json``.

    Raises:
        UserError: sizes that do not fit, stop strings without a tokenizer, a model without a shard map.
    """

    def __init__(
        self,
        model_dir: str,
        config: RolloutConfig,
        *,
        dtype: str,
        max_model_len: int,
        tp: int,
        seed: int,
        device: str,
        tokenizer: Any = None,
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size % tp:
            raise UserError(f"rollout.tp={tp} does not divide the world size {world_size}: set rollout.tp to a divisor")
        if config.stop and tokenizer is None:
            raise UserError(f"rollout.stop={config.stop} needs a tokenizer: set model.tokenizer")
        self.config, self.device, self.tokenizer, self.max_model_len = config, device, tokenizer, max_model_len
        self.version = -1
        self.stop_token_ids = stop_token_ids(model_dir, tokenizer)
        self._stop_strings = StopStrings(config.stop, tokenizer)
        self._serial = 0  # of requests, over all calls
        self._asleep: set[str] = set()  # tags of the memory that vLLM has given back
        compat.prepare_environment(device)
        if not dist.is_initialized():
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        values = compat.engine_arguments(
            model_dir, config, dtype=dtype, max_model_len=max_model_len, tp=tp, seed=seed, device=device
        )
        job = _shared_name()
        with GUARD.start():
            self._core = compat.build_core(values, device, job)
            if config.top_p < 1 or config.top_k > 0:
                compat.report_untruncated_log_probs(self._core)
            self._map, self._local = live_shard_map(compat.live_model(self._core))
            zero_uncovered(self._map, self._local)
        self._vocab_size = self._core.vllm_config.model_config.get_vocab_size()

    def generate(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[Sample], None] | None = None,
        *,
        temperature: float | None = None,
    ) -> list[Sample]:
        """All samples, in the order of ``requests``; every rank of the replica makes the same call.

        Args:
            requests: what to sample; a request's tokens depend on its seed alone, not on the other requests (up to
                rounding).
            on_finished: called as each sample ends, while others run.
            temperature: instead of ``rollout.temperature``; 0: greedy.

        Raises:
            UserError: a prompt that does not fit.
        """
        for request in requests:
            self._check(request)
        results: list[Sample | None] = [None] * len(requests)
        running: dict[str, _Running] = {}
        with GUARD.vllm():
            try:
                for index, request in enumerate(requests):
                    running[self._add(request, temperature)] = _Running(request, index)
                while running:
                    beat()
                    begin_s = time.monotonic()
                    for run, finished in self._step(running, begin_s):
                        sample = results[run.index] = self._sample(run, finished)
                        if on_finished is not None:
                            with GUARD.trainer():
                                on_finished(sample)
            except BaseException:
                self._core.abort_requests(list(running))
                raise
            while self._core.batch_queue:  # a step that was in flight when the last response ended
                self._core.step_fn()
        assert all(sample is not None for sample in results), "a request was lost"
        return [sample for sample in results if sample is not None]

    def _check(self, request: Request) -> None:
        prompt, limit = request.prompt, self.config.max_response_tokens
        length = len(prompt.input_ids)
        if length == 0:
            raise UserError(f"prompt {prompt.prompt_id} has no tokens: remove it from the prompt file")
        if length + limit > self.max_model_len:
            raise UserError(
                f"prompt {prompt.prompt_id}: {length} tokens + rollout.max_response_tokens {limit} = {length + limit}, "
                f"but the engine holds {self.max_model_len}: lower data.max_prompt_tokens or max_response_tokens"
            )
        largest = max(prompt.input_ids)
        if largest >= self._vocab_size or min(prompt.input_ids) < 0:
            raise UserError(
                f"prompt {prompt.prompt_id} has token id {largest}, but the model's vocabulary has {self._vocab_size}: "
                "use the model's own tokenizer"
            )

    def _add(self, request: Request, temperature: float | None) -> str:
        from vllm import SamplingParams

        config = self.config
        params = SamplingParams(
            temperature=config.temperature if temperature is None else temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_tokens=config.max_response_tokens,
            seed=request.seed,
            stop_token_ids=self.stop_token_ids,
            logprobs=0,
            detokenize=False,
        )
        self._serial += 1
        request_id = str(self._serial)
        new = compat.new_request(request_id, request.prompt.input_ids, params)
        self._core.add_request(*self._core.preprocess_add_request(new))
        return request_id

    def _step(self, running: dict[str, _Running], begin_s: float) -> list[tuple[_Running, bool]]:
        """One engine step. Takes responses that ended out of ``running``: (response, ended by itself)."""
        outputs, model_executed = self._core.step_fn()
        self._core.post_step(model_executed=model_executed)
        ended: list[tuple[_Running, bool]] = []
        stopped: list[str] = []
        for output in outputs[0].outputs if outputs and 0 in outputs else ():
            run = running.get(output.request_id)
            if run is None:
                continue
            if not run.response_ids:
                run.begin_s = begin_s
            run.response_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                run.log_probs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            if output.finish_reason is not None:
                reason = str(output.finish_reason)
                if reason not in ("stop", "length"):
                    raise RunError(f"vLLM ended prompt {run.request.prompt.prompt_id} with reason {reason!r}")
                ended.append((running.pop(output.request_id), reason == "stop"))
            elif self._stop_strings.found(run.response_ids):
                ended.append((running.pop(output.request_id), True))
                stopped.append(output.request_id)
        if stopped:
            self._core.abort_requests(stopped)
        return ended

    def _sample(self, run: _Running, finished: bool) -> Sample:
        assert len(run.log_probs) == len(run.response_ids), "one log-prob per token"
        finished = finished or self._stop_strings.found(run.response_ids)
        text = "" if self.tokenizer is None else self.tokenizer.decode(run.response_ids, skip_special_tokens=True)
        return Sample(
            request=run.request,
            response_ids=tuple(run.response_ids),
            log_probs=tuple(run.log_probs),
            finished=finished,
            version=self.version,
            text=text,
            seconds=time.monotonic() - run.begin_s,
        )

    def shard_map(self) -> tuple[ShardMap, Mapping[str, Tensor]]:
        """The live parameters by canonical HF name, and the local tensors that the map speaks of."""
        return self._map, self._local

    def set_version(self, version: int) -> None:
        """Stamps new weights and drops the prefix cache, whose keys and values are of the old ones.

        Raises:
            RunError: requests still run.
        """
        with GUARD.vllm():
            if self._core.scheduler.has_unfinished_requests() or not self._core.reset_prefix_cache():
                raise RunError(f"weights changed to version {version} while vLLM still generates")
        self.version = version

    def sleep(self) -> None:
        """Frees the GPU for the trainer; level 1 keeps the weights on the host, level 2 drops them: write all again."""
        if self.device == "cuda" and self.config.sleep_level > 0 and not self._asleep:
            with GUARD.vllm():
                self._core.sleep(self.config.sleep_level)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Takes GPU memory back, of what sleeps.

        Args:
            tags: ``weights``, then ``kv_cache``; None: both.

        Raises:
            RunError: the KV cache is to wake before the weights.
        """
        wanted = self._asleep if tags is None else self._asleep.intersection(tags)
        if wanted == {"kv_cache"} and "weights" in self._asleep:
            raise RunError("vLLM's KV cache was woken before its weights: wake the weights first")
        for tag in sorted(wanted, reverse=True):  # vLLM restores buffers among the weights at the first tag it gets
            with GUARD.vllm():
                self._core.wake_up([tag])
            if tag == "weights":
                zero_uncovered(self._map, self._local)
        self._asleep = self._asleep - wanted

    def close(self) -> None:
        """Frees the engine; the trainer's process groups live on."""
        with GUARD.vllm():
            compat.shut_down(self._core)
        self._local = {}


def preload(device: str) -> None:
    """Imports vLLM and does nothing else, so that processes forked afterwards need not: it takes seconds of CPU."""
    compat.prepare_environment(device)
    with GUARD.start():
        compat.import_vllm(device)


def stop_token_ids(model_dir: str, tokenizer: Any) -> list[int]:
    """The ids that end a response: the tokenizer's EOS and those of ``generation_config.json``.

    Without a tokenizer, those of ``config.json``: it may hold a default that means another token, so a tokenizer wins.
    """
    names = ["generation_config.json"] if tokenizer is not None else ["generation_config.json", "config.json"]
    ids: set[int] = set() if tokenizer is None or tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for name in names:
        path = Path(model_dir) / name
        if path.is_file():
            value = json.loads(path.read_text()).get("eos_token_id")
            ids.update(value if isinstance(value, Iterable) else [] if value is None else [value])
    return sorted(ids)


def _shared_name() -> str:
    """A name drawn by rank 0, the same on every rank, for what this job shares on a node."""
    names: list[Any] = [f"hpcrl{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(names, src=0)
    return str(names[0])
