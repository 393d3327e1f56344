"""The random generators go on where they were captured, each of them."""

from __future__ import annotations

import random

import numpy as np
import torch

from hpc_rl import rng


def draws() -> dict[str, float]:
    return {"torch": float(torch.rand(())), "numpy": float(np.random.rand()), "python": random.random()}


def test_every_generator_goes_on_where_it_was() -> None:
    before = rng.capture()
    try:
        rng.seed_all(3, rank=1)
        draws()
        states = rng.capture()
        expected = draws()
        rng.seed_all(4, rank=0)
        rng.restore(states)
        assert draws() == expected
    finally:
        rng.restore(before)
