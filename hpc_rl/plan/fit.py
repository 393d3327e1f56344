"""Values of a configuration that give way to the run: a warm-up to few steps, lengths to a model of few positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpc_rl.config import Config
from hpc_rl.plan.published import model_config


def fit(config: Config) -> Config:
    """``config`` with the values lowered that another model or fewer steps on the command line would make wrong.

    The critic's warm-up ends before the last step. With ``parallel.auto`` prompt and response share the model's
    positions; a layout given by hand keeps its lengths, which a run then refuses.

    Raises: UserError for a model that is not there.
    """
    warmup = min(config.algorithm.critic_warmup_steps, config.steps - 1)
    config = _with(config, "algorithm", critic_warmup_steps=warmup)
    if not config.parallel.auto:
        return config
    path, model = config.model.path, config.model.config
    hf = model_config("model.path", path) if path is not None else model or {}
    positions = hf.get("max_position_embeddings")
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if not isinstance(positions, int) or positions < 2 or prompt + response <= positions:
        return config
    prompt = min(prompt, positions // 2)
    response = min(response, positions - prompt)
    config = _with(config, "data", max_prompt_tokens=prompt)
    config = _with(config, "rollout", max_response_tokens=response)
    return _with(config, "algorithm", overlong_buffer_tokens=min(config.algorithm.overlong_buffer_tokens, response))


def _with(config: Any, section: str, **values: Any) -> Config:
    """``config`` with values of one section replaced (mypy does not know pydantic's dataclasses for such)."""
    new: Config = replace(config, **{section: replace(getattr(config, section), **values)})
    return new


def notes(config: Config, fitted: Config) -> list[str]:
    """What `fit` has lowered, one line each."""
    lines = []
    of_model = "the model's max_position_embeddings leave no room for more"
    for key, why in (
        ("algorithm.critic_warmup_steps", f"steps = {config.steps}, and the actor learns in the last one at least"),
        ("data.max_prompt_tokens", of_model),
        ("rollout.max_response_tokens", of_model),
        ("algorithm.overlong_buffer_tokens", of_model),
    ):
        section, name = key.split(".")
        before, after = (getattr(getattr(c, section), name) for c in (config, fitted))
        if before != after:
            lines.append(f"{key} = {before} is lowered to {after}: {why}")
    return lines
