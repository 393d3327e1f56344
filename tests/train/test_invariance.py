"""Loss and gradient do not depend on layout, micro-batches or order, for every algorithm, aggregation and objective."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.train.invariance import CASES, Expected, config_of, differences, expect

pytestmark = pytest.mark.xdist_group("train")

LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "small-micro-batches": (1, {"budget": 24}, False),
    "order": (1, {}, True),
    "dp2": (2, {}, False),
    "dp4-order": (4, {"budget": 40}, True),
    "tp2": (2, {"tp": 2}, False),
    "pp2": (2, {"pp": 2, "budget": 40}, False),
    "fsdp2": (3, {"engine": "fsdp2", "budget": 40}, False),
    "zero2-order": (2, {"engine": "zero2", "budget": 40}, True),
    "tp2pp2-order": (4, {"tp": 2, "pp": 2, "budget": 60}, True),
}


@pytest.fixture(scope="module")
def expected() -> Expected:
    (result,) = run_ranks(1, expect)
    return result


def test_every_case_has_a_loss_and_a_gradient(expected: Expected) -> None:
    """A loss or a gradient of zero would agree with anything."""
    for case in CASES:
        gradients = expected.gradients[case.label]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        assert expected.scales[case.label] > 1e-3, case.label
        assert norm > 1e-3 and math.isfinite(norm), case.label
    assert len({round(loss, 7) for loss in expected.losses.values()}) > len(CASES) / 2, "the cases are all alike"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_those_of_one_rank(layout: str, expected: Expected) -> None:
    world_size, values, reverse = LAYOUTS[layout]
    found = run_ranks(world_size, differences, expected, config_of(**values), reverse)[0]
    wrong = {label: errors for label, errors in found.items() if not max(errors) <= 1e-5}
    print(layout, "largest errors of loss and gradient:", *(max(e) for e in zip(*found.values(), strict=True)))
    assert not wrong, wrong
    assert set(found) == {case.label for case in CASES}
