"""Log-probs and entropy from hidden states, vocabulary-parallel and chunked: fp32 logits never exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_TOKENS = 2048  # tokens whose logits exist at once: 2048 x 152k fp32 = 1.2 GB
_MASKED = -1e30  # logit of a padded vocabulary row: finite, so that 0 * logit is 0 in the entropy


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy of softmax(hidden @ weight^T / temperature).

    Args:
        hidden: [n, h], the same on every rank of ``group``.
        weight: [v / tp, h], this rank's rows of the output embedding, padded rows last.
        targets: int64 [n], global vocabulary ids.
        temperature: of sampling.
        vocab_size: true size; rows beyond it are masked out of the denominator.
        group: tensor-parallel group, or None.

    Returns: (log_probs, entropy), float32 [n] each (float64 if ``hidden`` is), in nats, the same on every rank of
    ``group``. The gradient with respect to ``hidden`` is this rank's part: the caller sums it over ``group``.
    """
    return _TokenLogProbs.apply(hidden, weight, targets, temperature, vocab_size, group)


class _TokenLogProbs(torch.autograd.Function):
    """With s_j = logit_j - max, Z = sum exp(s_j), m = sum exp(s_j) s_j / Z: log p_t = s_t - log Z, H = log Z - m.

    Differences of large logits are taken first, so that neither cancels in float32. Forward keeps max, Z and m [n];
    backward recomputes the logits of each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        first = (dist.get_rank(group) if group is not None else 0) * weight.shape[0]
        n, dtype = hidden.shape[0], _dtype_of_logits(hidden)
        log_probs, entropy, top, total, mean = (hidden.new_empty(n, dtype=dtype) for _ in range(5))
        for lo in range(0, n, CHUNK_TOKENS):
            part = slice(lo, lo + CHUNK_TOKENS)
            logits = _logits(hidden[part], weight, temperature, vocab_size - first)
            target, mine = _local_targets(targets[part], first, weight.shape[0])
            top[part] = logits.max(dim=-1).values
            if group is not None:
                dist.all_reduce(top[part], op=dist.ReduceOp.MAX, group=group)
            shifted = logits.sub_(top[part, None])
            exp = shifted.exp()
            of_target = shifted.gather(-1, target[:, None])[:, 0].where(mine, 0.0)
            sums = torch.stack([exp.sum(-1), exp.mul_(shifted).sum(-1), of_target])
            if group is not None:
                dist.all_reduce(sums, group=group)
            total[part], mean[part] = sums[0], sums[1] / sums[0]
            log_probs[part] = sums[2] - sums[0].log()
            entropy[part] = sums[0].log() - mean[part]
            del logits, shifted, exp  # before those of the next chunk are made
        ctx.save_for_backward(hidden, weight, targets, top, total, mean)
        ctx.temperature, ctx.first, ctx.vocab_size = temperature, first, vocab_size
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, targets, top, total, mean = ctx.saved_tensors
        # d log p_t / d l_j = [j = t] - p_j ;  d H / d l_j = -p_j (log p_j + H) = -p_j (s_j - m) ;  p_j = exp(s_j) / Z
        grad_log_probs, grad_entropy = (grad / ctx.temperature for grad in grads)  # of logits before the temperature
        slope, offset = -grad_entropy / total, (grad_entropy * mean - grad_log_probs) / total
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=total.dtype)
        for lo in range(0, hidden.shape[0], CHUNK_TOKENS):
            part = slice(lo, lo + CHUNK_TOKENS)
            logits = _logits(hidden[part], weight, ctx.temperature, ctx.vocab_size - ctx.first)
            target, mine = _local_targets(targets[part], ctx.first, weight.shape[0])
            shifted = logits.sub_(top[part, None])
            exp = shifted.exp()
            grad = shifted.mul_(slope[part, None]).add_(offset[part, None]).mul_(exp)
            grad.scatter_add_(-1, target[:, None], (grad_log_probs[part] * mine)[:, None])
            grad = grad.to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += grad.t() @ hidden[part]
            del logits, shifted, exp, grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _dtype_of_logits(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _logits(hidden: Tensor, weight: Tensor, temperature: float, valid_rows: int) -> Tensor:
    logits = (hidden @ weight.t()).to(_dtype_of_logits(hidden))
    if temperature != 1.0:
        logits /= temperature
    if valid_rows < weight.shape[0]:
        logits[:, max(0, valid_rows) :] = _MASKED
    return logits


def _local_targets(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of this rank's weight that each target is (0 where it is another rank's), and whether it is this rank's."""
    local = targets - first
    mine = (local >= 0) & (local < rows)
    return local.where(mine, 0), mine
