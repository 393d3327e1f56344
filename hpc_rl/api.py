"""Models for scripts and notebooks, thin over what a run uses: vLLM generates, Megatron-core computes, one process.

    from hpc_rl import ActorModel, CriticModel, RewardModel

    with ActorModel.from_pretrained("runs/quickstart") as actor:      # a run, a checkpoint or an HF directory
        for sample in actor.generate(["12+34=", "99+1="], max_new_tokens=4, temperature=0):
            print(sample.request.prompt.text, sample.text)
        log_probs = actor.log_probs(["12+34=46"])                     # [float32 [tokens]]
        actor.save_pretrained("exported")                             # loads in transformers

    with CriticModel.from_pretrained("runs/quickstart") as critic:
        values = critic.values(["12+34=46"])                          # [float32 [tokens]]

    reward = RewardModel("hpc_rl.reward.functions:exact_match")       # or a callable, or a directory
    reward.score("12+34=", "46", {"answer": "46"})                    # 1.0

Several models may be open at once, also beside an `RLTrainer` of the same process, which must then be made first and
closed last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_rl.config import RewardConfig, RolloutConfig
from hpc_rl.data.prompt_files import Record
from hpc_rl.data.prompts import PromptSet
from hpc_rl.errors import UserError
from hpc_rl.model_engine import LoadedModel, Model, Text, check_list, configured
from hpc_rl.reshard.connect import connect
from hpc_rl.reward.score import RewardFunction, check_signature
from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.rollout.sampler import request_seed
from hpc_rl.rollout.vllm import VLLMEngine

Messages = Sequence[Mapping[str, Any]]  # a conversation: [{"role": "user", "content": "..."}, ...]


class ActorModel(Model):
    """A language model: generates with vLLM, scores with Megatron-core, on the same weights."""

    def __init__(self, loaded: LoadedModel, max_model_len: int, kv_cache_bytes: int | None) -> None:
        super().__init__(loaded)
        self.max_model_len = min(max_model_len, loaded.engine.spec.max_position_embeddings)
        self._memory = {"kv_cache_bytes": kv_cache_bytes, "sleep_level": 0}
        self._sampler: VLLMEngine | None = None

    @staticmethod
    def from_pretrained(
        path: str | Path,
        *,
        dtype: str | None = None,
        device: str = "auto",
        max_model_len: int = 2048,
        kv_cache_bytes: int | None = None,
    ) -> ActorModel:
        """Loads a model.

        Args:
            path: HF directory, checkpoint, or run directory (its newest checkpoint).
            dtype: ``float32`` or ``bfloat16``; None: as stored (float16 becomes bfloat16).
            device: ``auto``, ``cpu`` or ``cuda``.
            max_model_len: longest prompt plus response, in tokens; at most what the model's config allows.
            kv_cache_bytes: of vLLM; None: as ``rollout.kv_cache_bytes``.

        Raises:
            UserError: what is missing or does not fit.
        """
        return ActorModel(LoadedModel.load(path, "actor", dtype, device), max_model_len, kv_cache_bytes)

    def generate(
        self,
        prompts: Sequence[str | Messages],
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        n: int = 1,
        seed: int = 0,
    ) -> list[Sample]:
        """Samples responses.

        Args:
            prompts: texts, or conversations for the model's chat template.
            max_new_tokens: length limit of a response.
            temperature: 0: greedy.
            top_p, top_k: 1 and -1: off.
            n: responses per prompt.
            seed: the same seed gives the same responses, whatever else is in ``prompts`` (up to rounding).

        Returns:
            ``n`` samples for each prompt, prompt by prompt: ``text``, ``response_ids``, ``log_probs`` (of the tempered
            distribution), ``finished``.

        Raises:
            UserError: a prompt that does not fit ``max_model_len``, no chat template, values out of range.
        """
        for name, value, least in (("n", n, 1), ("temperature", temperature, 0)):
            if value < least:
                raise UserError(f"{name} = {value}: must be at least {least}")
        sampling = {"max_response_tokens": max_new_tokens, "top_p": top_p, "top_k": top_k, **self._memory}
        config = configured(RolloutConfig, sampling)
        self._loaded.check_open()
        tokenized = self._tokenize(prompts, max_new_tokens)
        sampler = self._start_sampler()
        sampler.config = config
        places = [(group, prompt, k) for group, prompt in enumerate(tokenized) for k in range(n)]
        requests = [Request(prompt, group, k, request_seed(seed, 0, group, k)) for group, prompt, k in places]
        return sampler.generate(requests, temperature=temperature)

    def log_probs(self, sequences: Sequence[Text], *, temperature: float = 1.0) -> list[Tensor]:
        """log p(token | the tokens before it), in nats, of softmax(logits / temperature).

        Args:
            sequences: texts or token ids.
            temperature: above 0.

        Returns:
            For each sequence float32 [number of tokens], on the CPU; 0 for the first token, which nothing predicts.
        """
        if temperature <= 0:
            raise UserError(f"temperature = {temperature}: must be above 0")
        self._loaded.check_open()
        self._loaded.engine.module.temperature = temperature
        return self._outputs(sequences, "log_probs")

    def _tokenize(self, prompts: Sequence[str | Messages], max_new_tokens: int) -> list[Prompt]:
        check_list(prompts, "prompts")
        if not prompts:
            return []
        for i, p in enumerate(prompts):
            if not isinstance(p, str) and not (isinstance(p, Sequence) and len(p) and isinstance(p[0], Mapping)):
                raise UserError(
                    f"prompts[{i}] = {str(p)[:60]} ({type(p).__name__}) must be a text, or a conversation "
                    '[{"role": "user", "content": "..."}]: write it so'
                )
        records = [
            Record(i, p if isinstance(p, str) else None, None if isinstance(p, str) else p, {}, f"prompts[{i}]")
            for i, p in enumerate(prompts)
        ]
        tokenized = list(PromptSet(records, self._loaded.tokenizer))
        for i, prompt in enumerate(tokenized):
            length = len(prompt.input_ids)
            if length + max_new_tokens > self.max_model_len:
                raise UserError(
                    f"prompts[{i}] has {length} tokens, with max_new_tokens = {max_new_tokens} that is "
                    f"{length + max_new_tokens}, but max_model_len is {self.max_model_len}: lower max_new_tokens, "
                    "or pass a larger max_model_len to from_pretrained (at most the model's max_position_embeddings)"
                )
        return tokenized

    def _start_sampler(self) -> VLLMEngine:
        """vLLM with this model's weights, made at the first use."""
        if self._sampler is None:
            loaded = self._loaded
            self._sampler = VLLMEngine(
                str(loaded.folder),
                # top_p < 1 and several samples only say what calls may ask for: each call brings its own.
                configured(RolloutConfig, {"top_p": 0.5, "samples_per_prompt": 2, **self._memory}),
                dtype=loaded.config.model.dtype,
                max_model_len=self.max_model_len,
                tp=1,
                seed=0,
                device=loaded.engine.parallel.device.type,
                tokenizer=loaded.tokenizer,
            )
            connect(loaded.engine.shard_map(), self._sampler.shard_map()).sync(0)
            self._sampler.set_version(0)
        return self._sampler

    def close(self) -> None:
        """Frees the model and vLLM."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        super().close()


class CriticModel(Model):
    """A value model: a language model's backbone with a value head."""

    role = "critic"

    @staticmethod
    def from_pretrained(path: str | Path, *, dtype: str | None = None, device: str = "auto") -> CriticModel:
        """Loads a critic: a run or checkpoint that has one, or an HF directory with a value head.

        Args:
            path: of which ``value_head.weight`` or ``score.weight`` (a sequence classifier of one label) is the head.
            dtype, device: as for `ActorModel.from_pretrained`.

        Raises:
            UserError: what is missing or does not fit.
        """
        return CriticModel(LoadedModel.load(path, "critic", dtype, device))

    def values(self, sequences: Sequence[Text]) -> list[Tensor]:
        """The value of the state before each token.

        Returns: for each sequence float32 [number of tokens], on the CPU; 0 for the first token.
        """
        return self._outputs(sequences, "values")

    def final_values(self, sequences: Sequence[Text]) -> list[float]:
        """The value after the last token: what a sequence classifier gives for the whole sequence."""
        check_list(sequences, "sequences")
        # One token more, of no matter which id: the value before it has seen the sequence and nothing else.
        ids = [[*self._loaded.token_ids(sequence), 0] for sequence in sequences]
        return [float(values[-1]) for values in self._loaded.forward(ids)["values"]] if ids else []


class RewardModel:
    """A reward: a function ``(prompt, response, fields, **kwargs) -> float``, or a value head at the response's end.

    Args:
        source: ``module:function``, a callable, or a directory as `CriticModel.from_pretrained` takes it.
        kwargs: handed to the function at each call; for a directory: ``dtype``, ``device``.

    Raises:
        UserError: a function that cannot be imported or called so, a directory without a value head.
    """

    def __init__(self, source: str | Path | Callable[..., Any], **kwargs: Any) -> None:
        self._critic: CriticModel | None = None
        self._function: RewardFunction | None = None
        if callable(source):
            check_signature(getattr(source, "__name__", repr(source)), source, kwargs)
            self._function = RewardFunction(source, kwargs)
        elif isinstance(source, str) and ":" in source and not Path(source).exists():
            self._function = RewardFunction.from_config(
                configured(RewardConfig, {"function": source, "kwargs": kwargs})
            )
        else:
            self._critic = CriticModel.from_pretrained(source, **kwargs)

    def score(self, prompt: str, response: str, fields: Mapping[str, Any] | None = None) -> float:
        """The score of one response. ``fields``: what the prompt's line holds beside its text, such as ``answer``.

        Raises: RunError if the function fails, naming what it failed on.
        """
        return self.scores([prompt], [response], [fields or {}])[0]

    def scores(
        self, prompts: Sequence[str], responses: Sequence[str], fields: Sequence[Mapping[str, Any]] | None = None
    ) -> list[float]:
        """The score of each response to the prompt at its place."""
        check_list(prompts, "prompts")
        fields = [{}] * len(prompts) if fields is None else fields
        if not len(prompts) == len(responses) == len(fields):
            raise UserError(
                f"{len(prompts)} prompts, {len(responses)} responses and {len(fields)} fields: give as many of each"
            )
        if self._critic is not None:
            return self._critic.final_values([p + r for p, r in zip(prompts, responses, strict=True)])
        assert self._function is not None, "either a function or a critic"
        return self._function.score([_sample(*parts) for parts in zip(prompts, responses, fields, strict=True)])

    def close(self) -> None:
        """Frees the model, if there is one."""
        if self._critic is not None:
            self._critic.close()


def _sample(prompt: str, response: str, fields: Mapping[str, Any]) -> Sample:
    """What a reward function is told of a response; it sees texts only."""
    return Sample(Request(Prompt(0, (), prompt, fields), 0, 0, 0), (), (), True, 0, response, 0.0)
