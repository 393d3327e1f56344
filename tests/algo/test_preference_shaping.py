"""Preference losses and reward shaping, worked out by hand."""

import math

import pytest
import torch

from hpc_rl.algo import masked, preference, shaping

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def close(actual: torch.Tensor, expected: object, tolerance: float = 1e-12) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# One sequence: prompt token, three response tokens; and one of a prompt token alone.
CU = torch.tensor([0, 4, 5])
MASK = torch.tensor([False, True, True, True, False])
NAN = float("nan")


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 6, 7, 9, 10])
    close(shaping.overlong_penalty(lengths, 10, 4, 0.5), [0, 0, -0.125, -0.375, -0.5])
    assert (shaping.overlong_penalty(lengths, 10, 0, 0.5) == 0).all()
    assert shaping.last_response_token(MASK, CU).tolist() == [False, False, False, True, False]


def test_informative_groups() -> None:
    groups = torch.tensor([4, 4, 2, 2, 3])
    assert shaping.informative(tensor(1, 0, 1, 1, 1), groups).tolist() == [True, True, False, False, False]


def test_preference_losses() -> None:
    chosen, rejected = tensor(1.0, 0.0), tensor(0.0, 0.5)
    close(preference.dpo(chosen, rejected, 0.5), [math.log1p(math.exp(-0.5)), math.log1p(math.exp(0.25))])
    smooth = 0.9 * math.log1p(math.exp(-0.5)) + 0.1 * math.log1p(math.exp(0.5))
    assert float(preference.dpo(chosen, rejected, 0.5, 0.1)[0]) == pytest.approx(smooth)
    close(preference.ipo(chosen, rejected, 0.5), [0.0, 2.25])
    close(preference.reward_model(chosen, rejected, tensor(1.0, -0.5), 0.1), [math.log(2) + 0.1, math.log(2) + 0.025])
    close(
        preference.sft(tensor(NAN, -2, float("-inf")), torch.tensor([False, True, True])), [0, 2, -masked.LOG_PROB_MIN]
    )
    metrics = preference.pair_metrics(tensor(1, 1), tensor(0, 1), scale=2.0)
    assert metrics["accuracy"].tolist() == [1.0, 0.0] and metrics["margin"].tolist() == [2.0, 0.0]


def test_pairs_are_neighbours() -> None:
    log_probs, cu = tensor(-1, -2, -3, -4, -5, -6), torch.tensor([0, 2, 3, 3, 6])
    mask = torch.tensor([False, True, True, True, True, False])
    chosen, rejected = preference.log_ratio_margins(log_probs, torch.zeros(6, dtype=F64), mask, cu)
    close(chosen, [-2, 0])  # the third response is empty
    close(rejected, [-3, -9])
    close(preference.log_ratio_margins(log_probs, torch.zeros(6, dtype=F64), mask, cu, average=True)[1], [-3, -4.5])
