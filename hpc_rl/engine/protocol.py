"""What the loop asks of a training engine. Satisfied by shape, without a base class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from hpc_rl.batch import Batch
from hpc_rl.tensors.shardmap import ShardMap

# (outputs of the model, micro-batch) -> (sum of weighted token losses, metrics as sums over the micro-batch).
# Outputs are per token [n] and carry gradients: ``log_probs`` and ``entropy`` of an actor, ``values`` of a critic.
# The micro-batch holds whole sequences with all arrays of the mini-batch, ``loss_weights`` among them: they already
# contain the global denominator, so that losses, gradients and metrics of all micro-batches and ranks simply add up.
LossFn = Callable[[Mapping[str, Tensor], Batch], tuple[Tensor, Mapping[str, Tensor]]]


class TrainEngine(Protocol):
    """One model under training (or frozen) on this job's ranks.

    Every rank holds the same whole batch; the engine picks this rank's share, and its results are again whole and
    the same on every rank.
    """

    def forward(self, batch: Batch) -> Mapping[str, Tensor]:
        """Outputs without gradients for all tokens of ``batch``: name -> float32 [N] on the CPU."""

    def train_batch(self, batch: Batch, loss_fn: LossFn, outputs: dict[str, Tensor] | None = None) -> dict[str, float]:
        """One optimizer step on ``batch``. Returns the loss, the metrics' global sums, grad_norm and lr.

        ``outputs``, if given, takes the forward pass's outputs, as `forward` would have returned them.

        Raises RunError before any weight changes if the loss or the gradient is not finite.
        """

    def shard_map(self) -> tuple[ShardMap, Mapping[str, Tensor]]:
        """This rank's parameters by canonical HF name, and the local tensors that the map speaks of."""

    def state(self) -> tuple[ShardMap, Mapping[str, Tensor], Mapping[str, Any]]:
        """All that a resume needs: map, local tensors (``param/..``, ``exp_avg/..``, ...), and small values (JSON)."""

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Takes the small values back, after the tensors named by ``state()`` were filled in place."""

    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def close(self) -> None: ...
