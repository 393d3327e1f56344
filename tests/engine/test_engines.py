"""Every engine at every layout against Hugging Face and torch AdamW in one process, float32."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.engine.layouts import (
    config_of,
    covered,
    critic_loss,
    keep_and_restore,
    nan_step,
    train_actor,
    train_critic,
    value_head,
)
from tests.engine.reference import CLIP, LR, STEPS, WEIGHT_DECAY, Truth, batch_of, hf_model, truth
from tests.ranks import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-no-sp": (2, {"tp": 2, "sequence_parallel": False}),
    "pp2": (2, {"pp": 2}),
    "pp3-uneven": (3, {"pp": 3}),
    "dp2": (2, {}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}),
    "tp2dp2": (4, {"tp": 2}),
    "tp4-more-than-kv-heads": (4, {"tp": 4}),
    "tp2pp2dp2": (8, {"tp": 2, "pp": 2}),
    "recompute": (2, {"tp": 2, "recompute": "full"}),
    "fsdp2-one": (1, {"engine": "fsdp2"}),
    "fsdp2": (2, {"engine": "fsdp2"}),
    "zero1": (2, {"engine": "zero1"}),
    "zero2": (2, {"engine": "zero2"}),
    "zero2-dp3": (3, {"engine": "zero2", "recompute": "full"}),
    "fsdp2-dp3": (3, {"engine": "fsdp2", "recompute": "full"}),
}
MODELS = {"llama": ("llama", False), "qwen2-tied": ("qwen2", True), "qwen3": ("qwen3", False)}


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest) -> Truth:
    return truth(*MODELS[request.param])


@pytest.fixture(scope="module")
def llama() -> Truth:
    return truth("llama", False)


def close(got: object, expected: object, atol: float, rtol: float = 0.0, name: str = "") -> None:
    torch.testing.assert_close(
        torch.as_tensor(got), torch.as_tensor(expected), atol=atol, rtol=rtol, msg=lambda m: f"{name}: {m}"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_actor_agrees_with_hf(reference: Truth, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    for got in run_ranks(world_size, train_actor, reference, config_of(60, **parallel)):
        close(got["log_probs"], reference.log_probs, 5e-6, name="log_probs")
        close(got["entropy"], reference.entropy, 5e-6, name="entropy")
        close(got["losses"], reference.losses, 3e-6, name="losses")
        close(got["grad_norms"], reference.grad_norms, 1e-5, 1e-5, name="grad_norms")
        for name, value in got["final"].items():
            # Adam turns the rounding of a zero gradient into up to lr a step: a key bias has no true gradient. Elsewhere
            # single elements whose gradient nearly vanishes may differ by a few percent of lr, all others by rounding.
            close(value, reference.final[name], 3e-3 if name.endswith("k_proj.bias") else 5e-5, name=name)
            if not name.endswith("k_proj.bias"):
                assert (value - reference.final[name]).abs().quantile(0.999) < 1e-5, name


BF16 = {"megatron": (2, {}), "fsdp2": (3, {"engine": "fsdp2"}), "zero2": (2, {"engine": "zero2"})}


@pytest.mark.parametrize("engine", BF16)
def test_bf16_stays_near_float32_and_restores_bitwise(llama: Truth, engine: str) -> None:
    """Main weights are float32: three steps of 1e-3 move a weight by ten times what bf16 rounds off near 0.05."""
    world_size, parallel = BF16[engine]
    config = config_of(60, dtype="bfloat16", **parallel)
    for got in run_ranks(world_size, train_actor, llama, config):
        close(got["log_probs"], llama.log_probs, 0.15, name="log_probs")
        close(got["losses"], llama.losses, 0.02, name="losses")
        close(got["grad_norms"], llama.grad_norms, 0.0, 0.03, name="grad_norms")
        for name, value in got["final"].items():
            if value.dim() == 1:
                continue  # near 1, where bf16 rounds off more than three steps move
            moved, expected = value - llama.initial[name], llama.final[name] - llama.initial[name]
            assert float((moved - expected).abs().mean()) < 0.25 * float(expected.abs().mean()), name
    assert all(run_ranks(world_size, keep_and_restore, llama, config))
    names = {name.split("/")[0] for rank in run_ranks(world_size, covered, llama, config) for name, _ in rank}
    assert names == {"param", "main", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("budget", [21, 1000])
def test_loss_does_not_depend_on_micro_batches(llama: Truth, budget: int) -> None:
    (got,) = run_ranks(1, train_actor, llama, config_of(budget))
    close(got["losses"], llama.losses, 3e-6)
    close(got["grad_norms"], llama.grad_norms, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2-no-sp", "pp2", "tp2pp2dp2", "fsdp2", "zero2"])
def test_critic_agrees_with_hf(llama: Truth, layout: str) -> None:
    expected = hf_critic()
    world_size, parallel = LAYOUTS[layout]
    for got in run_ranks(world_size, train_critic, llama, config_of(60, **parallel)):
        close(got["values"], expected["values"], 5e-6, name="values")
        close(got["losses"], expected["losses"], 1e-6, 1e-5, name="losses")
        close(got["grad_norms"], expected["grad_norms"], 1e-5, 1e-5, name="grad_norms")
        close(got["final"]["value_head.weight"], expected["value_head"], 1e-5, name="value_head.weight")


def hf_critic() -> dict[str, object]:
    """The backbone of the Hugging Face model, a linear head, torch AdamW."""
    backbone = hf_model("llama").model
    head = torch.nn.Linear(64, 1, bias=False)
    head.weight.data.copy_(value_head(64))
    params = [*backbone.parameters(), head.weight]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)

    def values_of(step: int) -> torch.Tensor:
        batch, rows = batch_of(step), []
        for lo, hi in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            value = head(backbone(batch["input_ids"][None, lo:hi]).last_hidden_state)[0, :, 0]
            rows.append(torch.cat([value.new_zeros(1), value[:-1]]))
        return torch.cat(rows) * batch["response_mask"]

    values, losses, norms = values_of(0).detach(), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = critic_loss(values_of(step), batch_of(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return {"values": values, "losses": losses, "grad_norms": norms, "value_head": head.weight.detach()}


@pytest.mark.parametrize("layout", ["one", "tp2pp2dp2", "fsdp2", "fsdp2-dp3", "zero1", "zero2-dp3"])
def test_state_restores_bitwise(llama: Truth, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    assert all(run_ranks(world_size, keep_and_restore, llama, config_of(60, **parallel)))


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2dp2", "tp4-more-than-kv-heads", "fsdp2-dp3", "zero2-dp3"])
def test_state_covers_every_element(llama: Truth, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    held: Counter[str] = Counter()
    for rank in run_ranks(world_size, covered, llama, config_of(60, **parallel)):
        held.update(dict(_totals(rank)))
    for name, value in llama.initial.items():
        replicas = 1 if "norm" not in name else parallel.get("tp", 1)
        # AdamW's moments are disjoint over DP: each element once (norms once per TP rank).
        assert held[f"exp_avg/{name}"] == held[f"exp_avg_sq/{name}"] == value.numel() * replicas, name


def _totals(pieces: list[tuple[str, int]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for name, numel in pieces:
        totals[name] += numel
    return totals


@pytest.mark.parametrize("layout", ["one", "tp2pp2", "fsdp2", "zero1"])
def test_nan_loss_stops_before_the_weights_change(llama: Truth, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    for message, weights_unchanged in run_ranks(world_size, nan_step, llama, config_of(60, **parallel)):
        assert weights_unchanged
        assert re.search(r"actor: loss is nan.*rank \d: loss of prompts \[0", message), message
