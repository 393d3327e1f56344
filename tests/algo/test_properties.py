"""What must hold for every algorithm: nothing outside the mask matters, nor do order, packing and split."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_rl.algo.registry import OBJECTIVES
from hpc_rl.algo.step import prepare
from hpc_rl.algo.supervised import supervised_loss, with_weights
from hpc_rl.batch import Batch
from hpc_rl.config import AlgorithmConfig, Config, RolloutConfig
from hpc_rl.config_schema import LEAVES, choices
from tests.algo.batches import (
    AGGREGATIONS,
    FLOATS,
    NAMES,
    full_config,
    losses_and_gradients,
    make_batch,
    outputs_of,
    whole_step,
)

quick = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
names = pytest.mark.parametrize("name", NAMES)
aggregations = pytest.mark.parametrize("aggregation", AGGREGATIONS)
CORRECTIONS = [m for m in choices(LEAVES["algorithm.correction"].annotation) if m != "none"]
REJECTIONS = [m for m in choices(LEAVES["algorithm.reject"].annotation) if m != "none"]
seeds = st.integers(0, 10**6)
garbage = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e30, -3.0])


def exact(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def near(actual: object, expected: object, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def perturbed(batch: Batch, value: float) -> Batch:
    outside = ~batch["response_mask"]
    tokens = {name: batch[name].masked_fill(outside, value) for name in FLOATS}
    return batch.with_tokens(**tokens, input_ids=batch["input_ids"] + 5 * outside)


def check_mask(config: Config, seed: int, value: float, num_sequences: int) -> None:
    """Garbage outside the mask changes no metric, array, loss or gradient of a step."""
    clean = make_batch(seed, num_sequences)
    outputs = outputs_of(clean)
    outside = ~clean["response_mask"]
    dirty = perturbed(clean, value)
    dirty_outputs = {k: v.masked_fill(outside, value) for k, v in outputs.items()}
    (expected, expected_metrics), (actual, actual_metrics) = whole_step(clean, config), whole_step(dirty, config)
    assert actual_metrics == expected_metrics
    for array in ("token_level_rewards", "advantages", "returns", "loss_weights", "correction_weights", "loss_mask"):
        exact(actual[array], expected[array])
        assert (actual[array][outside] == 0).all()
    exact(
        losses_and_gradients(actual, config, dirty_outputs), losses_and_gradients(expected, config, outputs)
    )  # gradients too, and finite where the output was not


@names
@quick
@given(seed=seeds, value=garbage, num_sequences=st.integers(1, 7))
def test_nothing_outside_the_mask_matters(name: str, seed: int, value: float, num_sequences: int) -> None:
    check_mask(full_config(name, aggregation=AGGREGATIONS[seed % 4]), seed, value, num_sequences)


@pytest.mark.parametrize("correction", CORRECTIONS)
@quick
@given(seed=seeds, value=garbage, normalize=st.booleans())
def test_nothing_outside_the_mask_matters_to_a_correction(
    correction: str, seed: int, value: float, normalize: bool
) -> None:
    values = {"correction_low": 0.8, "correction_high": 1.2, "correction_normalize": normalize}
    check_mask(full_config("grpo", correction=correction, **values), seed, value, 5)


@pytest.mark.parametrize("rule", REJECTIONS)
@quick
@given(seed=seeds, value=garbage)
def test_nothing_outside_the_mask_matters_to_a_rejection(rule: str, seed: int, value: float) -> None:
    low, high = (0.8, 1.2) if rule.endswith("k1") else (0.5, 0.02)
    check_mask(full_config("grpo", reject=rule, reject_low=low, reject_high=high), seed, value, 5)


@pytest.mark.parametrize("name", list(OBJECTIVES))
@quick
@given(seed=seeds, value=garbage, pairs=st.integers(1, 4))
def test_nothing_outside_the_mask_matters_to_an_objective(name: str, seed: int, value: float, pairs: int) -> None:
    extras = {"label_smoothing": 0.1} if name == "dpo" else {"reward_center": 0.1} if name == "reward_model" else {}
    algo = AlgorithmConfig(name=name, aggregation=AGGREGATIONS[seed % 4], **{**OBJECTIVES[name].defaults, **extras})
    config = Config(algorithm=algo, rollout=RolloutConfig(max_response_tokens=16))
    clean = make_batch(seed, 2 * pairs)
    if name != "sft":
        clean = clean.with_sequences(pair_ids=torch.arange(2 * pairs) // 2)
    outputs, outside = outputs_of(clean), ~clean["response_mask"]
    results = []
    for batch, values in (
        (clean, outputs),
        (perturbed(clean, value), {k: v.masked_fill(outside, value) for k, v in outputs.items()}),
    ):
        leaves = {k: v.clone().requires_grad_(True) for k, v in values.items()}
        loss, metrics = supervised_loss(config)(leaves, with_weights(batch, config))
        loss.backward()
        gradients = {k: v.grad for k, v in leaves.items() if v.grad is not None}
        assert gradients and all((g[outside] == 0).all() for g in gradients.values())
        results.append({"loss": loss.detach(), **metrics, **gradients})
    assert results[0]["loss"] != 0 or not clean["response_mask"].any()
    exact(results[1], results[0])


@names
@aggregations
@quick
@given(seed=seeds)
def test_micro_batches_and_ranks_add_up(name: str, aggregation: str, seed: int) -> None:
    """Any split into sets of whole sequences, in any order: sums of losses and metrics, gradients token by token."""
    config = full_config(name, aggregation=aggregation)
    part, _ = whole_step(make_batch(seed, num_sequences=7), config)
    expected = losses_and_gradients(part, config, outputs_of(part))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(part), generator=generator)
    sets = torch.tensor_split(order, sorted(torch.randint(0, 8, (3,), generator=generator).tolist()))  # some are empty
    token_ids = part.with_tokens(token=torch.arange(part.num_tokens))
    sums: dict[str, torch.Tensor] = {}
    gradients = {k: torch.zeros_like(v) for k, v in expected.items() if k.startswith("grad/")}
    for indices in sets:
        micro = token_ids.select(indices)
        for key, value in losses_and_gradients(micro, config, outputs_of(micro)).items():
            if key in gradients:
                gradients[key][micro["token"]] = value
            else:
                sums[key] = sums.get(key, torch.zeros(())) + value
    near(sums | gradients, expected)


@names
@quick
@given(seed=seeds)
def test_order_of_sequences_does_not_matter(name: str, seed: int) -> None:
    config = full_config(name)
    batch = make_batch(seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    expected, expected_metrics = whole_step(batch, config)
    actual, metrics = whole_step(batch.select(order), config)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-9)
    for array in ("token_level_rewards", "advantages", "returns", "loss_weights", "correction_weights"):
        near(actual[array], expected.select(order)[array], 1e-9)


@names
@quick
@given(seed=seeds)
def test_float32_agrees_with_float64(name: str, seed: int) -> None:
    """The loop's arrays are float32: same results to rounding, and float32 out."""
    config = full_config(name, reject="none", clip_low=0.9, clip_high=9.0)  # no threshold for rounding to cross
    exact_part, _ = whole_step(make_batch(seed), config)
    part, _ = whole_step(make_batch(seed, dtype=torch.float32), config)
    results, expected = (losses_and_gradients(p, config, outputs_of(p)) for p in (part, exact_part))
    assert part["advantages"].dtype == part["loss_weights"].dtype == results["loss"].dtype == torch.float32
    for key in ("loss", "grad/log_probs", "loss/value"):
        scale = float(expected[key].abs().max())
        near(results[key].double(), expected[key].double(), 1e-5 * max(1.0, scale))


@names
@quick
@given(seed=seeds, shift=st.integers(-5, 5))
def test_names_of_groups_do_not_matter(name: str, seed: int, shift: int) -> None:
    config = full_config(name)
    batch = make_batch(seed)
    renamed = batch.with_sequences(group_ids=1000 - 3 * batch["group_ids"] + shift)
    near(prepare(renamed, config, 0.1)[0]["advantages"], prepare(batch, config, 0.1)[0]["advantages"])
