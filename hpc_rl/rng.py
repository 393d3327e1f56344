"""The state of every random generator of this process, as arrays for a checkpoint."""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch


def capture() -> dict[str, np.ndarray]:
    """torch (CPU and this rank's GPU), NumPy and Python generators: name -> uint8 array."""
    states = {
        "torch": torch.get_rng_state().numpy().copy(),
        "numpy": np.frombuffer(pickle.dumps(np.random.get_state()), dtype=np.uint8),
        "python": np.frombuffer(pickle.dumps(random.getstate()), dtype=np.uint8),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return states


def restore(states: dict[str, np.ndarray]) -> None:
    """Takes ``capture()`` back. A state of a device that is not here is left out."""
    torch.set_rng_state(torch.from_numpy(np.asarray(states["torch"], dtype=np.uint8).copy()))
    np.random.set_state(pickle.loads(np.asarray(states["numpy"], dtype=np.uint8).tobytes()))
    random.setstate(pickle.loads(np.asarray(states["python"], dtype=np.uint8).tobytes()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.asarray(states["cuda"], dtype=np.uint8).copy()))


def seed_all(seed: int, rank: int) -> None:
    """Seeds every generator of this process; ranks differ."""
    torch.manual_seed(seed + 1_000_003 * rank)
    np.random.seed((seed + 1_000_003 * rank) % 2**32)
    random.seed(seed + 1_000_003 * rank)
