"""vLLM on a GPU: CUDA graphs, sleep levels, weights written after them, log-probs, seeds. One process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.config import RolloutConfig
from hpc_rl.errors import RunError
from hpc_rl.rollout.vllm import VLLMEngine
from tests.rollout import jobs
from tests.rollout.models import canonical, hf_model, log_probs, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GiB = 1 << 30


@contextmanager
def running(root: Path, kind: str, model: Any, **changes: Any) -> Iterator[VLLMEngine]:
    """An engine with the weights of ``model``."""
    values = {"max_response_tokens": jobs.LIMIT, "temperature": jobs.TEMPERATURE, "samples_per_prompt": 2}
    values |= {"kv_cache_bytes": 2 * GiB, "gpu_memory_utilization": 0.2} | changes
    engine = VLLMEngine(
        write_model(root, kind), RolloutConfig(**values), dtype="bfloat16", max_model_len=jobs.MAX_MODEL_LEN, tp=1,
        seed=0, device="cuda",
    )  # fmt: skip
    try:
        jobs.write(engine, canonical(model))
        engine.set_version(0)
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()


def results(engine: VLLMEngine) -> list[Any]:
    return [(s.response_ids, s.log_probs) for s in engine.generate(jobs.requests(4))]


def mean_error(engine: VLLMEngine, model: Any) -> float:
    """Of the log-probs, against HF in float32 on the CPU."""
    errors = [
        (torch.tensor(s.log_probs) - log_probs(model, s.request.prompt.input_ids, s.response_ids, 0.7)).abs()
        for s in engine.generate(jobs.requests(4))
    ]
    return float(torch.cat(errors).mean())


def test_graphs_seeds_and_sleep_level_2(tmp_path: Path) -> None:
    model = hf_model("qwen2_tied", 0)
    with running(tmp_path, "qwen2_tied", model, sleep_level=2) as engine:
        assert mean_error(engine, model) < 0.05
        before = results(engine)
        assert len({ids for ids, _ in before}) == len(before)
        state = torch.cuda.get_rng_state()
        assert results(engine) == before
        assert torch.equal(torch.cuda.get_rng_state(), state)
        for version in (1, 2):
            free = torch.cuda.mem_get_info()[0]
            engine.sleep()
            assert torch.cuda.mem_get_info()[0] - free > 1.9 * GiB
            with pytest.raises(RunError, match="wake the weights first"):
                engine.wake(["kv_cache"])
            engine.wake(["weights"])
            jobs.write(engine, canonical(model))
            engine.wake(["kv_cache"])
            engine.set_version(version)
            assert results(engine) == before


def test_sleep_level_1_keeps_the_weights(tmp_path: Path) -> None:
    model = hf_model("llama", 0)
    with running(tmp_path, "llama", model, sleep_level=1, enforce_eager=True) as engine:
        before = results(engine)
        engine.sleep()
        engine.wake()
        assert results(engine) == before


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_log_probs_ignore_the_cut_of_the_vocabulary(tmp_path: Path, kind: str) -> None:
    model = hf_model(kind, 0)
    with running(tmp_path, kind, model, top_p=0.6, sleep_level=0, enforce_eager=True) as engine:
        assert mean_error(engine, model) < 0.05
