"""Makes what `configs/sft.yaml`, `dpo.yaml` and `reward_model.yaml` read: additions with a right and a careless answer.

    python -m hpc_rl.data.tasks.addition_pairs configs/quickstart configs/preference

Each line has the prompt and answer of the quickstart's, ``response`` and ``chosen`` (the right sum) and ``rejected`` (a
careless pupil's wrong one).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from hpc_rl.data.tasks.addition import careless_answer

NUM_TRAIN, NUM_EVAL = 2048, 256


def pair_line(prompt_line: str, rng: random.Random) -> str:
    """One JSON line with chosen and rejected, from one of the quickstart's."""
    record = json.loads(prompt_line)
    a, b = (int(text) for text in record["text"].rstrip("=").split("+"))
    wrong = right = a + b
    while wrong == right:
        wrong = careless_answer((a, b), rng)
    return json.dumps({**record, "response": str(right), "chosen": str(right), "rejected": str(wrong)})


def write_pairs(source: Path, target: Path, seed: int = 0) -> None:
    """Writes ``train.jsonl`` and ``eval.jsonl`` into ``target``, from the prompts in ``source``."""
    rng = random.Random(seed)
    target.mkdir(parents=True, exist_ok=True)
    for name, prompts, count in (("train", "prompts", NUM_TRAIN), ("eval", "eval", NUM_EVAL)):
        lines = (source / f"{prompts}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        text = "".join(pair_line(line, rng) + "\n" for line in lines)
        (target / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the quickstart's directory")
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_pairs(args.source, args.target, args.seed)


if __name__ == "__main__":
    main()
