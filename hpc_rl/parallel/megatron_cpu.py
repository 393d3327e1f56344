"""What megatron-core 0.16.1 needs to train on CPUs with gloo. Every function here does nothing where CUDA is present.

megatron-core asks for device "cuda", calls ``Tensor.cuda()`` and compares ``Tensor.type()`` with strings. Inside
``cuda_as_cpu()`` these mean the CPU. The scope is entered around Megatron's calls only, so that nothing else in the
process (vLLM, the user's reward) sees a changed torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaAsCpu(TorchFunctionMode):
    """Factories on "cuda" give CPU tensors, ``x.cuda()`` is x, ``x.type()`` names the cuda type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if kwargs:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Within it Megatron's "cuda" is the CPU; re-entrant; nothing outlives it."""
    if torch.cuda.is_available():
        yield
        return
    kept = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    try:
        with _CudaAsCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = kept


class _NoRngStates:
    """Stands for Megatron's CUDA RNG tracker: models here have no dropout, so nothing draws from it."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        assert not states, "no RNG states exist on the CPU"

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def install_rng_tracker(seed: int) -> None:
    """Gives Megatron the RNG tracker that its layers ask for. Call once after initialize_model_parallel."""
    import megatron.core.tensor_parallel.random as megatron_random

    if torch.cuda.is_available():
        megatron_random.model_parallel_cuda_manual_seed(seed)
        return
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoRngStates()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Activation recomputation saves and restores "the CUDA state".
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
