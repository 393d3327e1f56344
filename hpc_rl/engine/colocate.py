"""Who is on the GPU when. On the CPU, and without off-load, everything stays where it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Moves whole storages between a GPU and pinned host memory, keeping every tensor and view valid.

    The host buffers are made once and reused, so that at most one extra copy exists.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type == "cuda"}
        self._storages = [(s, s.nbytes()) for p, s in storages.items() if p]
        self._host: list[Tensor] = []

    def offload(self) -> None:
        """Device memory is free when this returns."""
        if not self._storages:  # a CPU job: nothing is on a GPU
            return
        if not self._host:
            self._host = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for _, n in self._storages]
        for (storage, n), host in zip(self._storages, self._host, strict=True):
            host.copy_(_bytes(storage, n), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        for storage, _ in self._storages:
            storage.resize_(0)

    def onload(self) -> None:
        """The contents are back, in stream order, when this returns."""
        for (storage, n), host in zip(self._storages, self._host, strict=True):
            storage.resize_(n)
            _bytes(storage, n).copy_(host, non_blocking=True)


def _bytes(storage: torch.UntypedStorage, n: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (n,), (1,))


class Colocation:
    """The phases of a step as the devices see them: generate -> train -> reshard -> generate.

    ``engines`` off-load between `reshard` and `train`; the sampler sleeps between `train` and `reshard`.
    """

    def __init__(self, sampler: Any, engines: list[Any], *, offload: bool) -> None:
        self._sampler, self._engines, self._offload = sampler, engines, offload
        self._trainers_here = True
        self._sampler_awake = True

    def generate(self) -> None:
        """The sampler gets the device."""
        if self._offload and self._trainers_here:
            for engine in self._engines:
                engine.offload()
            self._trainers_here = False
        self._sampler.wake(["kv_cache"])
        self._sampler_awake = True

    def train(self) -> None:
        """The training engines get the device."""
        if self._sampler_awake:
            self._sampler.sleep()
            self._sampler_awake = False
        if not self._trainers_here:
            for engine in self._engines:
                engine.onload()
            self._trainers_here = True

    def reshard(self) -> None:
        """Both hold their weights: the trainer's are read, the sampler's written."""
        self._sampler.wake(["weights"])
