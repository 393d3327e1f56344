"""One rank of a resharding test: a tiny model's source and target tensors."""

from typing import Any

import torch

from hpc_rl.parallel.layout import Layout
from hpc_rl.reshard.execute import Resharder
from hpc_rl.reshard.plan import make_plan
from hpc_rl.tensors.canonical import ModelSpec
from tests.reshard.layouts import maps_of
from tests.tensors.models import empty_locals, fill, random_tensors


class Job:
    """One rank's source and target tensors of a tiny model."""

    def __init__(self, rank: int, spec: ModelSpec, layout: Layout, gen_tp: int, dtypes=("float32", "float32")) -> None:
        self.spec, self.rank = spec, rank
        self.sources, self.targets = maps_of(spec, layout, gen_tp, dtypes)
        self.source_map, self.target_map = self.sources[rank], self.targets[rank]
        self.source = empty_locals(self.source_map, getattr(torch, dtypes[0]))
        self.target = empty_locals(self.target_map, getattr(torch, dtypes[1]))
        self.whole = random_tensors(spec)
        fill(self.source_map, self.source, self.whole)

    def resharder(self, **kw: Any) -> Resharder:
        plan = make_plan(self.sources, self.targets, node_size=4)
        return Resharder(
            plan.of(self.rank), self.source, self.target, **{"timeout_s": 20.0, "bucket_bytes": 1 << 15, **kw}
        )

    def change(self, share: float, only: tuple[str, ...] = (), seed: int = 1) -> None:
        """Changes that share of the elements of the canonical tensors, alike on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        for name, value in self.whole.items():
            flat = value.view(-1)
            index = torch.randperm(flat.numel(), generator=generator)[: int(share * flat.numel())]
            if not only or name in only:
                flat[index] += 1
        fill(self.source_map, self.source, self.whole)

    def check(self) -> None:
        expected = {k: torch.full_like(t, float("nan")) for k, t in self.target.items()}
        fill(self.target_map, expected, self.whole)
        for local, value in expected.items():
            assert torch.equal(value.nan_to_num(7), self.target[local].nan_to_num(7)), (self.rank, local)


def failures(results: list) -> list[str]:
    for result in results:
        if isinstance(result, AssertionError):
            raise result
    return [str(r) if isinstance(r, Exception) else "" for r in results]
