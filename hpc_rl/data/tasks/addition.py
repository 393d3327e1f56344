"""Makes everything that `configs/quickstart.yaml` reads: two-digit additions, a byte tokenizer and a tiny model.

    python -m hpc_rl.data.tasks.addition configs/quickstart

The model first learns to add, then reads the answers of careless pupils: more often than not they carry where nothing
is to be carried (or do not where they should), and often the last digit is off by one. It copies those mistakes: about
one sampled answer in four is right, and reinforcement learning has something to repair. About a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_rl.data.tasks.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer
from hpc_rl.data.tasks.output import whole_directory, write_whole
from hpc_rl.errors import UserError

Pair = tuple[int, int]

NUM_TRAIN, NUM_EVAL = 4096, 512
PROMPT_TOKENS, ANSWER_TOKENS = len("12+34="), len("198") + 1
MAX_TOKENS = 64
WRONG_CARRY_SHARE, SLIP_SHARE = 0.55, 0.4  # of the careless answers; independent of each other
CLEAN_STEPS, CARELESS_STEPS = 600, 200
BATCH_SIZE, PEAK_LR, WARMUP_STEPS = 128, 2e-3, 50


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """All 8,100 pairs of two-digit numbers in random order, cut into those to train on and those held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_EVAL:], pairs[:NUM_EVAL]


def write_prompts(path: Path, pairs: list[Pair], first_id: int) -> None:
    """Writes one JSON line per pair: prompt_id, text and answer."""
    lines = [
        json.dumps({"prompt_id": first_id + i, "text": f"{a}+{b}=", "answer": str(a + b)})
        for i, (a, b) in enumerate(pairs)
    ]
    write_whole(path, "\n".join(lines) + "\n")


def careless_answer(pair: Pair, rng: random.Random) -> int:
    """The sum, often with the carry into the tens wrong, or off by one, or both."""
    a, b = pair
    answer = a + b
    if rng.random() < WRONG_CARRY_SHARE:
        answer += -10 if a % 10 + b % 10 >= 10 else 10
    if rng.random() < SLIP_SHARE:
        answer += rng.choice([-1, 1])
    return answer


def encode(pairs: list[Pair], answers: list[int]) -> tuple[Tensor, Tensor]:
    """int64 [B, PROMPT_TOKENS + ANSWER_TOKENS] ids, and bool [B, ANSWER_TOKENS]: which are answer or end of text."""
    rows = [[*f"{a}+{b}={answer}".encode(), EOS_ID] for (a, b), answer in zip(pairs, answers, strict=True)]
    width = PROMPT_TOKENS + ANSWER_TOKENS
    ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    return ids, ids[:, PROMPT_TOKENS:] != PAD_ID


def answer_log_probs(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """float32 [B, ANSWER_TOKENS, VOCAB_SIZE]: log-probabilities at the positions that predict the answer."""
    return model(ids).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, pairs: list[Pair]) -> tuple[float, float]:
    """Probability of the right answer when sampling at temperature 1, and share right when decoding greedily."""
    ids, mask = encode(pairs, [a + b for a, b in pairs])
    log_probs, target = answer_log_probs(model, ids), ids[:, PROMPT_TOKENS:]
    chosen = log_probs.gather(-1, target[..., None])[..., 0]
    sampled = (chosen * mask).sum(1).exp().mean()
    greedy = ((log_probs.argmax(-1) == target) | ~mask).all(1).float().mean()
    return sampled.item(), greedy.item()


def new_model(seed: int) -> LlamaForCausalLM:
    """A random Llama of 2 layers; its wide initialisation makes so small a model learn in hundreds of steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config).float()


def learning_rate(step: int) -> float:
    """Warm-up, plateau and linear decay while learning to add; then a lower rate that decays to 0."""
    if step < CLEAN_STEPS:
        left = 1 - step / CLEAN_STEPS
        return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, 1.5 * left + 0.05)
    return 0.4 * PEAK_LR * (1 - (step - CLEAN_STEPS) / CARELESS_STEPS)


def pretrain(pairs: list[Pair], held_out: list[Pair], seed: int) -> LlamaForCausalLM:
    """Next-token training on right answers, then on careless ones; prints the accuracy on ``held_out``."""
    model, rng = new_model(seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(CLEAN_STEPS + CARELESS_STEPS):
        drawn = rng.choices(pairs, k=BATCH_SIZE)
        answers = [a + b if step < CLEAN_STEPS else careless_answer((a, b), rng) for a, b in drawn]
        ids, mask = encode(drawn, answers)
        chosen = answer_log_probs(model, ids).gather(-1, ids[:, PROMPT_TOKENS:, None])[..., 0]
        loss = -(chosen * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        if (step + 1) % 100 == 0:
            sampled, greedy = accuracy(model, held_out)
            print(f"step {step + 1} | loss {loss.item():.3f} | sampled {sampled:.3f} | greedy {greedy:.3f}", flush=True)
    return model


def make(directory: Path, seed: int) -> None:
    """Writes prompts.jsonl, eval.jsonl and model/ into ``directory``, replacing what was there."""
    torch.set_num_threads(1)  # the sums of several threads come in another order: another model
    train, held_out = split_pairs(seed)
    model = pretrain(train, held_out, seed)
    write_prompts(directory / "prompts.jsonl", train[:NUM_TRAIN], first_id=NUM_EVAL)
    write_prompts(directory / "eval.jsonl", held_out, first_id=0)
    with whole_directory(directory / "model") as scratch:
        model.save_pretrained(scratch)
        byte_tokenizer(MAX_TOKENS).save_pretrained(scratch)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_rl.data.tasks.addition",
        description="Make the prompts, the byte tokenizer and the tiny model of the quickstart.",
        epilog="example: python -m hpc_rl.data.tasks.addition configs/quickstart",
    )
    parser.add_argument("directory", type=Path, help="where prompts.jsonl, eval.jsonl and model/ go")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the mistakes (default 0)")
    arguments = parser.parse_args(argv)
    try:
        make(arguments.directory, arguments.seed)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
