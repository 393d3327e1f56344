"""What the API tests do in a forked process that no launcher started (see tests/ranks.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_rl import ActorModel, CriticModel, RewardModel, RLTrainer, load_config
from hpc_rl.errors import UserError
from tests.ranks import run_ranks

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` in a forked process of its own, as a plain Python script would run it."""
    return run_ranks(1, _alone, fn, args)[0]


def _alone(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    for name in LAUNCHER:
        del os.environ[name]
    return fn(*args)


def two_trainers(directory: Path) -> list[dict[str, float]]:
    """Last metrics of three trainings one after the other; the third continues the second."""
    out = []
    for name, resume, steps in (("a", "none", 2), ("b", "none", 1), ("b", "auto", 1)):
        config = load_config(QUICKSTART, [f"run.dir={directory / name}", "data.prompts_per_step=8", f"resume={resume}"])
        trainer = RLTrainer(config=config)
        out.append(trainer.train(max_steps=steps) | {"steps_done": trainer.steps_done})
        trainer.close()
        assert not dist.is_initialized(), "close() leaves the job"
    return out


def after_a_failed_start(directory: Path) -> tuple[str, bool, int]:
    """(error of a damaged checkpoint, whether the lock was left, steps of the trainer made next in this process)."""
    values = [f"run.dir={directory}", "data.prompts_per_step=8", "steps=1"]
    trainer = RLTrainer(config=load_config(QUICKSTART, values))
    trainer.train()
    trainer.close()
    (shard,) = (directory / "checkpoints" / "checkpoint_1_complete" / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[4096::512] = bytes(b ^ 1 for b in data[4096::512])
    shard.write_bytes(data)
    try:
        RLTrainer(config=load_config(QUICKSTART, [*values, f"resume={shard.parents[1]}"]))
        message = "accepted"
    except UserError as error:
        message = str(error)
    left = (directory / "lock").read_text() != ""
    trainer = RLTrainer(config=load_config(QUICKSTART, values))
    trainer.train()
    done = trainer.steps_done
    trainer.close()
    return message, left, done


def side_by_side(directory: Path, model: Path) -> list[list[str]]:
    """What two models answer beside a trainer, before and after its next step and the end of one of them."""
    config = load_config(QUICKSTART, [f"run.dir={directory}", "data.prompts_per_step=32", "algorithm.mini_batches=1"])
    trainer = RLTrainer(config)
    trainer.train(max_steps=1)
    first, second = ActorModel.from_pretrained(directory), ActorModel.from_pretrained(model)
    prompts = [f"{10 + i}+{20 + i}=" for i in range(16)]

    def answers(actor: ActorModel) -> list[str]:
        return [sample.text for sample in actor.generate(prompts, max_new_tokens=4, temperature=0)]

    out = [answers(first), answers(second)]
    trainer.train(max_steps=1)
    out.append(answers(first))
    first.close()
    out.append(answers(second))
    second.close()
    trainer.train(max_steps=1)
    trainer.close()
    return out


def generate(model: Path, prompts: list[str]) -> dict[str, Any]:
    """Greedy and sampled responses, and the trainer's log-probs of the sampled ones."""
    out: dict[str, Any] = {}
    with ActorModel.from_pretrained(model, dtype="float32") as actor:
        greedy = actor.generate(prompts, max_new_tokens=6, temperature=0)
        out["greedy"] = [(s.request.prompt.text, s.response_ids, s.text, s.finished) for s in greedy]
        sampling = {"max_new_tokens": 6, "temperature": 0.7, "top_p": 0.8, "n": 3}
        sampled = actor.generate(prompts, **sampling, seed=5)
        out["sampled"] = [s.response_ids for s in sampled]
        out["again"] = [s.response_ids for s in actor.generate(prompts, **sampling, seed=5)]
        out["other seed"] = [s.response_ids for s in actor.generate(prompts, **sampling, seed=6)]
        out["short"] = [len(s.response_ids) for s in actor.generate(prompts, max_new_tokens=1, top_k=1)]
        sequences = [[*s.request.prompt.input_ids, *s.response_ids] for s in sampled]
        log_probs = actor.log_probs(sequences, temperature=0.7)
        out["mismatch"] = max(
            float((ours[-len(s.log_probs) :] - torch.tensor(s.log_probs)).abs().max())
            for ours, s in zip(log_probs, sampled, strict=True)
        )
        out["text log-probs"] = actor.log_probs(prompts)[0].tolist()
        out["none"] = [*actor.generate([], max_new_tokens=1), *actor.log_probs([])]
    assert not dist.is_initialized(), "the last model leaves the job that was made for it"
    return out


def refusals(model: Path, empty: Path) -> list[str]:
    """One message for each misuse."""
    with ActorModel.from_pretrained(model) as actor:
        misuses: list[Callable[[], Any]] = [
            lambda: actor.generate("1+1="),
            lambda: actor.generate([{"role": "user", "content": "1+1="}]),  # type: ignore[list-item]
            lambda: actor.generate([[{"role": "user", "content": "1+1="}]]),
            lambda: actor.generate([""]),
            lambda: actor.generate(["1" * 60], max_new_tokens=5),
            lambda: actor.generate(["1"], top_p=1.5),
            lambda: actor.generate(["1"], n=0),
            lambda: actor.generate(["1"], temperature=-1),
            lambda: actor.generate([[49, 50]]),  # type: ignore[list-item]
            lambda: actor.generate([None]),  # type: ignore[list-item]
            lambda: actor.generate(["1\ud800"]),
            lambda: actor.log_probs(["1\ud800"]),
            lambda: actor.log_probs([[1, 258]]),
            lambda: actor.log_probs([[]]),
            lambda: actor.log_probs(["1"], temperature=0),
            lambda: actor.save_pretrained(model),
            lambda: CriticModel.from_pretrained(model),
            lambda: ActorModel.from_pretrained(empty / "nowhere"),
            lambda: ActorModel.from_pretrained(empty),
            lambda: ActorModel.from_pretrained(model, dtype="int8"),
            lambda: ActorModel.from_pretrained(model, device="gpu"),
            lambda: RewardModel("hpc_rl.reward.functions:nothing"),
            lambda: RewardModel(lambda prompt: 0.0),
            lambda: RewardModel(lambda p, r, f: 0.0).scores(["a", "b"], ["c"]),
        ]
        messages = [_message(misuse) for misuse in misuses]
    actor.close()  # twice is once
    closed = [lambda: actor.generate(["1"], max_new_tokens=1), lambda: actor.log_probs(["1"])]
    return messages + [_message(misuse) for misuse in closed]


def _message(misuse: Callable[[], Any]) -> str:
    try:
        misuse()
    except UserError as error:
        return str(error)
    return "no error"


def save_again(model: Path, out: Path, dtype: str | None) -> None:
    """Through the engine and out again."""
    with ActorModel.from_pretrained(model, dtype=dtype) as actor:
        actor.save_pretrained(out)


def values(path: Path, texts: list[str], out: Path | None) -> dict[str, Any]:
    """Values per token and at the end, by the critic and by a reward model on it."""
    with CriticModel.from_pretrained(path, dtype="float32") as critic:
        found: dict[str, Any] = {
            "ids": [critic.token_ids(text) for text in texts],
            "values": [v.tolist() for v in critic.values(texts)],
            "final": critic.final_values(texts),
        }
        if out is not None:
            critic.save_pretrained(out)
    reward = RewardModel(path, dtype="float32")
    found["reward"] = [reward.score(text[:3], text[3:]) for text in texts]
    reward.close()
    return found
