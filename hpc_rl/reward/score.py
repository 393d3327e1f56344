"""Calls the reward function that the configuration names, and deals with its failures."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_rl.config import RewardConfig
from hpc_rl.errors import RunError, UserError

if TYPE_CHECKING:
    from hpc_rl.rollout.protocol import Sample

log = logging.getLogger(__name__)

_EXCERPT_CHARS = 80
_REASON_CHARS = 300
_LOGGED_ERRORS = 3  # in full; the others are counted


class RewardFunction:
    """Scores finished responses one by one.

    ``num_errors`` counts the samples whose reward failed (an exception, or a result that is no finite number) since the
    start; a metric shows them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        kwargs: Mapping[str, Any] | None = None,
        on_error: Literal["fail", "score"] = "fail",
        error_score: float = 0.0,
    ) -> None:
        self.function = function
        self.kwargs = dict(kwargs or {})
        self.on_error = on_error
        self.error_score = error_score
        self.num_errors = 0

    @staticmethod
    def from_config(config: RewardConfig) -> RewardFunction:
        """Imports ``reward.function``. Raises UserError if it is not there, not callable, or takes other arguments."""
        function = import_function(config.function)
        check_signature(config.function, function, config.kwargs)
        for package in getattr(function, "required_packages", ()):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"reward.function = {config.function}: needs {package}, which is not installed: pip install "
                    f"{package.replace('_', '-')}"
                )
        return RewardFunction(function, config.kwargs, config.on_error, config.error_score)

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Fields that each prompt must have, as the function declares with `requires`."""
        return tuple(getattr(self.function, "required_fields", ()))

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One score for each of ``samples``, in their order.

        Raises:
            RunError: a reward failed and ``on_error`` is ``fail``. It names the sample.
        """
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: Sample) -> float:
        prompt = sample.request.prompt
        try:
            result = self.function(prompt.text, sample.text, prompt.fields, **self.kwargs)
            score = _finite(result)
        except (Exception, SystemExit) as error:  # a user's code may raise anything, sys.exit() included
            return self._failed(sample, error)
        return score

    def _failed(self, sample: Sample, error: BaseException) -> float:
        excerpt = sample.text if len(sample.text) <= _EXCERPT_CHARS else sample.text[:_EXCERPT_CHARS] + "..."
        reason = " ".join(str(error).split())[:_REASON_CHARS] or "no message"
        message = (
            f"the reward function failed on prompt_id {sample.request.prompt.prompt_id}, sample_id "
            f"{sample.request.sample_id}, response {excerpt!r}: {type(error).__name__}: {reason}"
        )
        if self.on_error == "fail":
            raise RunError(
                f"{message}: correct the function, or set reward.on_error=score to go on with reward.error_score"
            ) from error
        self.num_errors += 1
        if self.num_errors <= _LOGGED_ERRORS:
            log.warning("%s: scored %s (reward.on_error is score)", message, self.error_score)
        return self.error_score


def import_function(name: str) -> Callable[..., Any]:
    """The object that ``module:function`` names. Raises UserError."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise UserError(
            f"reward.function = {name}: must be module:function, for example hpc_rl.reward.functions:exact_match"
        )
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"reward.function = {name}: there is no module {error.name}: correct the name, or put its directory "
                "on PYTHONPATH"
            ) from None
        raise UserError(
            f"reward.function = {name}: importing {module_name} needs {error.name}: pip install it"
        ) from error
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"reward.function = {name}: importing {module_name} raises {type(error).__name__}: {reason}: correct it"
        ) from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise UserError(f"reward.function = {name}: {module_name} has no {path}: it has {_functions(target)}")
        target = getattr(target, part)
    if not callable(target):
        raise UserError(
            f"reward.function = {name}: is a {type(target).__name__}, but must be a function: name a function"
        )
    return target


def code_digest(name: str) -> str:
    """Digest of the file that holds ``module:function``, so that scores of edited code are told from older ones.

    "" where there is no file (a module of a zip archive, or an extension without one).
    """
    spec = importlib.util.find_spec(name.partition(":")[0])
    origin = None if spec is None else spec.origin
    if origin is None or not Path(origin).is_file():
        return ""
    return hashlib.blake2b(Path(origin).read_bytes(), digest_size=16).hexdigest()


def check_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses what cannot be called as ``function(prompt, response, fields, **kwargs)``. Raises UserError."""
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward.function = {name}: is async, but must be a plain function: wrap it in asyncio.run")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins tell no signature: the first call will
    try:
        signature.bind("prompt", "response", {}, **kwargs)
    except TypeError as error:
        given = "".join(f", {key}={value!r}" for key, value in kwargs.items())
        raise UserError(
            f"reward.function = {name}: takes {signature}, but is called as (prompt, response, fields{given}) "
            f"({error}): correct its arguments or reward.kwargs"
        ) from None


def _functions(module: Any) -> str:
    names = (
        [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        if hasattr(module, "__dict__")
        else []
    )
    return ", ".join(names[:8]) or "no public function"


def _finite(result: Any) -> float:
    """A score as a float. Raises TypeError or ValueError for what is none (None, text, NaN, a vector)."""
    if not hasattr(type(result), "__float__"):
        raise TypeError(f"the result is {result!r} ({type(result).__name__}), but must be a number")
    score = float(result)
    if not math.isfinite(score):
        raise ValueError(f"the result is {score}, but must be finite")
    return score
