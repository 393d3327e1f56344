"""Log-probs and entropy of the model's head against recorded results of verl and TRL; in float32, and vocabulary-parallel.

The output embedding is the identity, so that the hidden states are the logits and their gradient is that of the logits.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_rl.algo.losses import loss_weights
from hpc_rl.algo.masked import keep
from hpc_rl.engine import head
from hpc_rl.engine.head import token_log_probs
from tests.algo.cases import LAYOUTS, Case, Flat, close, load
from tests.ranks import run_ranks

ENTROPY = [c for c in load("entropy") if c.fn == "entropy"]
LOG_PROBS = [c for c in load("entropy") if c.fn in ("logprobs", "trl_logprob_entropy")]
assert (len(ENTROPY), len(LOG_PROBS)) == (23, 6)


@pytest.fixture(params=[2048, 2], ids=["one-chunk", "chunks-of-2"], autouse=True)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_TOKENS", request.param)


def apply(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The head on logits [n, v]."""
    vocab_size = logits.shape[1]
    return token_log_probs(logits, torch.eye(vocab_size, dtype=logits.dtype), targets, temperature, vocab_size, None)


@pytest.mark.parametrize("case", LOG_PROBS, ids=lambda c: c.name)
def test_log_probs_and_entropy(case: Case) -> None:
    vocab_size = case["logits"].shape[-1]
    logits, labels = case["logits"].reshape(-1, vocab_size), case["labels"].flatten()
    log_probs, entropy = apply(logits, labels, case.params.get("temperature", 1.0))
    assert log_probs.dtype == torch.float64
    close(log_probs, case.expected["log_probs"].flatten())
    if case.fn == "trl_logprob_entropy":
        close(entropy, case.expected["entropy"].flatten())
        close(apply(logits, labels)[1], case.expected["entropy_no_temperature"].flatten())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ENTROPY, ids=lambda c: c.name)
def test_entropy_its_gradient_and_its_aggregation(case: Case, layout: str) -> None:
    flat, vocab_size = Flat(case["response_mask"], layout), case["logits"].shape[-1]
    logits = case["logits"].reshape(-1, vocab_size)[flat.index.clamp(min=0)].requires_grad_(True)
    _, entropy = apply(logits, torch.zeros(len(logits), dtype=torch.int64))
    close(entropy[flat.mask], flat(case.expected["token_entropy"])[flat.mask])
    mode = case.params["loss_agg_mode"]
    weights = flat.mask.double()  # token-sum: not offered, the token mean without its denominator
    if mode != "token-sum":
        weights = loss_weights(mode, flat.mask, flat.cu_seqlens, flat.shape[1], torch.float64)
    loss = (weights * keep(entropy, flat.mask)).sum()
    loss.backward()
    close(loss, case.expected["entropy_loss"])
    assert logits.grad is not None
    expected = case.expected["grad_logits"].reshape(-1, vocab_size)[flat.index.clamp(min=0)]
    close(logits.grad[flat.mask], expected[flat.mask])
    assert (logits.grad[~flat.mask] == 0).all()


def extreme(dtype: torch.dtype) -> Tensor:
    """Logits [6, 5] of up to 1000 with small differences, and with large ones."""
    (case,) = (c for c in ENTROPY if c.name == "entropy_extreme")
    rows = torch.tensor([[1000.0, 999.0, 998.5, 0.0, -1000.0], [-500.0, -500.25, -501.0, -500.0, -502.0]])
    return torch.cat([case["logits"].reshape(-1, 5).float(), rows]).to(dtype)


def with_gradients(logits: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """log_probs, entropy, and gradients of a mix of both in the logits."""
    logits = logits.clone().requires_grad_(True)
    log_probs, entropy = apply(logits, torch.arange(len(logits)) % 5, temperature)
    mix = torch.linspace(-1, 1, len(logits), dtype=logits.dtype)
    (mix * log_probs + (1 - mix) * entropy).sum().backward()
    assert logits.grad is not None
    return log_probs.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_float32_keeps_its_digits_at_extreme_logits(temperature: float) -> None:
    """Relative 1e-6: log-sum-exp less the mean logit would leave none of the entropy's digits beside a logit of 1000."""
    for actual, expected in zip(
        with_gradients(extreme(torch.float32), temperature),
        with_gradients(extreme(torch.float64), temperature),
        strict=True,
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float64_is_autograd_of_log_softmax(temperature: float) -> None:
    logits = extreme(torch.float64).requires_grad_(True)
    log_p = (logits / temperature).log_softmax(-1)
    mix = torch.linspace(-1, 1, len(logits), dtype=torch.float64)
    chosen = log_p.gather(1, (torch.arange(len(logits)) % 5)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (mix * chosen + (1 - mix) * entropy).sum().backward()
    for actual, expected in zip(
        with_gradients(logits.detach(), temperature), (chosen, entropy, logits.grad), strict=True
    ):
        close(actual, expected)


def vocab_parallel(temperature: float) -> list[Tensor]:
    """As `with_gradients`, each rank with its rows of the embedding: 5 of them and padding up to 4 a rank."""
    dist.init_process_group("gloo")
    rows = torch.eye(5, dtype=torch.float64)
    weight = torch.cat([rows, torch.full((3, 5), 7.0, dtype=torch.float64)])[4 * dist.get_rank() :][:4]
    logits = extreme(torch.float64).requires_grad_(True)
    log_probs, entropy = token_log_probs(
        logits, weight, torch.arange(len(logits)) % 5, temperature, 5, dist.group.WORLD
    )
    mix = torch.linspace(-1, 1, len(logits), dtype=torch.float64)
    (mix * log_probs + (1 - mix) * entropy).sum().backward()
    assert logits.grad is not None
    dist.all_reduce(logits.grad)  # as the caller does
    dist.destroy_process_group()
    return [log_probs.detach(), entropy.detach(), logits.grad]


def test_vocabulary_parallel_with_padding() -> None:
    expected = with_gradients(extreme(torch.float64), 0.7)
    for got in run_ranks(2, vocab_parallel, 0.7):
        for actual, value in zip(got, expected, strict=True):
            close(actual, value)
