"""What only a GPU shows: kernels against torch, float32 and bf16 engines against the CPU, sleep and off-load cycles."""

from __future__ import annotations

import os

import pytest
import torch

from hpc_rl.engine.kernels import fused_adamw, rotate, swiglu
from tests.engine.reference import LR, STEPS, WEIGHT_DECAY, batch_of, loss_of, truth
from tests.ranks import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch sees none"),
]


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> None:
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**names, "MASTER_PORT": str(free_port()), "HPC_RL_LOCAL": "1"}


@pytest.mark.parametrize("shape", [(7, 96), (33, 2, 2 * 1500)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = swiglu(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(dy.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-3)
    assert x.grad is not None and exact.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("heads", [1, 6])
def test_rotate(heads: int) -> None:
    x = torch.randn(11, heads, 48, device="cuda", requires_grad=True)
    angles = torch.rand(11, 24, device="cuda") * 6
    y = rotate(x, angles.cos(), angles.sin())
    y.backward(torch.ones_like(y))
    cpu = x.detach().cpu().requires_grad_()
    expected = rotate(cpu, angles.cos().cpu(), angles.sin().cpu())
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), cpu.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_adamw_is_torchs(dtype: torch.dtype) -> None:
    start = torch.randn(5000, device="cuda")
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    main, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    out = torch.empty(5000, device="cuda", dtype=dtype) if dtype != torch.float32 else None
    for step in range(1, 6):
        grad = torch.randn(5000, device="cuda")
        theirs.grad = grad * 0.5
        optimizer.step()
        fused_adamw(main, grad, m, v, out, 0.5, 1e-2, 0.1, 0.9, 0.95, 1e-8, step)
    torch.testing.assert_close(main, theirs.detach(), rtol=2e-6, atol=2e-6)
    if out is not None:
        assert torch.equal(out, main.to(dtype))


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_engine_agrees_with_the_cpu(kind: str, dtype: str, atol: float) -> None:
    from hpc_rl.config import Config, ModelConfig, OptimizerConfig
    from hpc_rl.engine.megatron import MegatronEngine
    from hpc_rl.parallel import state as parallel_state
    from hpc_rl.tensors.canonical import ModelSpec
    from tests.engine.layouts import fill

    reference = truth(kind, False)
    optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=1.0)
    config = Config(model=ModelConfig(dtype=dtype, config={}), actor=optimizer)
    state = parallel_state.initialize(config, torch.device("cuda", 0))
    spec = ModelSpec.from_hf_config(reference.config)
    engine = MegatronEngine("actor", spec, config, state, optimizer=optimizer, total_steps=STEPS)
    fill(engine, reference.initial)
    outputs = engine.forward(batch_of(0))
    torch.testing.assert_close(outputs["log_probs"], reference.log_probs, atol=atol, rtol=0)
    for step, expected in enumerate(reference.losses):
        got = engine.train_batch(batch_of(step), lambda o, b: (loss_of(o["log_probs"], o["entropy"], b), {}))
        assert got["loss"] == pytest.approx(expected, abs=atol)
        engine.offload()
        engine.onload()


def test_five_cycles_of_sleep_and_offload(tmp_path: object) -> None:
    from hpc_rl.train import RLTrainer
    from tests.train.runs import quickstart

    config = quickstart(
        launch__device="cuda",
        model__dtype="bfloat16",
        parallel__offload="true",
        reshard__verify="always",
        rollout__sleep_level=2,
        rollout__enforce_eager="true",
        rollout__kv_cache_bytes=1 << 28,
    )
    trainer = RLTrainer(config)
    for step in range(1, 6):
        metrics = trainer.step(step)
        assert metrics["mismatch/abs_max"] < 0.3, "the sampler's weights are not the trainer's"
        assert metrics["reshard/seconds_verify"] > 0
    trainer.close()
