"""Makes a prompt file of reasoning tasks with verifiers, from the PyPI package reasoning-gym.

    pip install --no-deps -r requirements/smollm2.txt
    python -m hpc_rl.data.tasks.reasoning prompts/chain_sum.jsonl --task chain_sum --num 512 \
        --set min_terms=2 --set max_terms=2 --set min_digits=1 --set max_digits=1

Each line holds ``prompt_id``, ``messages`` (the question as a chat), ``answer``, and ``task`` and ``entry`` for the
reward `hpc_rl.reward.functions:reasoning_gym`, which asks the task's own verifier.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from hpc_rl.data.tasks.output import write_whole
from hpc_rl.errors import UserError
from hpc_rl.reward.reasoning import factory

_SEED_STRIDE = 1_000_003
_DRAWS_PER_PROMPT = 100  # before giving up on a question that is not excluded


def make_entries(
    task: str, num: int, seed: int, settings: Mapping[str, Any], exclude: Container[str] = ()
) -> Iterator[dict[str, Any]]:
    """Entries of a reasoning-gym data set, as JSON keeps them.

    reasoning-gym draws entry i of seed s with seed s + i, so that neighbouring seeds share nearly all entries; here
    each seed has a stretch of its own: seed 1 can be held out from seed 0.

    Args:
        task: name of the data set, such as ``chain_sum``.
        num: entries.
        seed: different seeds share no draw.
        settings: values of the data set's configuration.
        exclude: questions that may not occur.
    Raises: UserError for an unknown task or setting, values that the task refuses, or too few questions.
    """
    gym = factory()
    if task not in gym.DATASETS:
        raise UserError(
            f"--task {task}: is no task of reasoning-gym that can be imported here{_nearest(task, gym.DATASETS)}"
        )
    known = [f.name for f in dataclasses.fields(gym.DATASETS[task][1]) if f.name not in ("seed", "size")]
    for name in settings:
        if name not in known:
            raise UserError(f"--set {name}: is no setting of {task}: use one of {', '.join(known)}")
    try:
        num_draws = num * _DRAWS_PER_PROMPT
        dataset = gym.create_dataset(task, seed=seed * _SEED_STRIDE, size=num_draws, **settings)
        draws = (dataset[i] for i in range(num_draws))
        kept = islice((entry for entry in draws if entry["question"] not in exclude), num)
        yield from (_as_json(dataset, entry) for entry in kept)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"--task {task} with {dict(settings)}: {error}: correct the --set values") from None


def _as_json(dataset: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry after a trip through JSON (tuples are lists then); its verifier must still accept its answer."""
    entry = json.loads(json.dumps(entry))
    score = dataset.score_answer(entry["answer"], entry)
    if score < 0.99:
        raise ValueError(f"the verifier scores its own answer {entry['answer']!r} {score} once kept as JSON")
    return entry


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (nearest: {', '.join(near)})" if near else ""


def write_prompts(
    path: Path, task: str, num: int, seed: int = 0, settings: Mapping[str, Any] | None = None,
    system: str | None = None, exclude: Path | None = None,
) -> None:  # fmt: skip
    """Writes ``num`` prompts of one task as JSON lines, whole or not at all.

    Args:
        path: the file.
        task, num, seed, settings: see `make_entries`.
        system: a system message before each question; None: the chat template's own.
        exclude: a file that this function wrote, whose questions may not occur in this one.
    Raises: UserError.
    """
    lines: list[str] = []
    seen = read_questions(exclude) if exclude else frozenset()
    for i, entry in enumerate(make_entries(task, num, seed, settings or {}, seen)):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": entry["question"]})
        line = {"prompt_id": i, "messages": messages, "answer": entry["answer"], "task": task, "entry": entry}
        lines.append(json.dumps(line, ensure_ascii=False))
    if len(lines) < num:
        raise UserError(
            f"--num {num}: only {len(lines)} of {num * _DRAWS_PER_PROMPT} draws are not in {exclude}: lower --num, or "
            "widen the task with --set"
        )
    write_whole(path, "\n".join(lines) + "\n")


def read_questions(path: Path) -> frozenset[str]:
    """The questions of a prompt file that `write_prompts` wrote. Raises UserError."""
    try:
        return frozenset(json.loads(line)["entry"]["question"] for line in path.read_text().splitlines())
    except OSError as error:
        raise UserError(f"--exclude {path}: cannot be read ({error.strerror}): name a file of this command") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--exclude {path}: holds no entries with questions: name a file of this command") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """``max_terms=2`` -> ("max_terms", 2); the value is YAML. Raises UserError."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UserError(f"--set {text}: must be NAME=VALUE, such as --set max_terms=2")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is no YAML: quote it") from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_rl.data.tasks.reasoning",
        description="Make a prompt file of reasoning tasks with verifiers, from the package reasoning-gym.",
        epilog="example: python -m hpc_rl.data.tasks.reasoning prompts/gcd.jsonl --task gcd --set max_value=50",
    )
    parser.add_argument("path", type=Path, help="the JSONL file to write")
    parser.add_argument("--task", default="chain_sum", help="a data set of reasoning-gym (default chain_sum)")
    parser.add_argument("--num", type=int, default=512, help="prompts (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="different seeds share no draw (default 0)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the task; repeat")
    parser.add_argument("--exclude", type=Path, metavar="PATH", help="a file of this command: none of its questions")
    parser.add_argument("--system", help="system message (default: the chat template's)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.num < 1 or arguments.seed < 0:
            raise UserError(f"--num {arguments.num} --seed {arguments.seed}: num must be at least 1, seed at least 0")
        settings = dict(parse_setting(text) for text in arguments.set)
        write_prompts(
            arguments.path, arguments.task, arguments.num, arguments.seed, settings, arguments.system, arguments.exclude
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.path}: {arguments.num} prompts of {arguments.task}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
