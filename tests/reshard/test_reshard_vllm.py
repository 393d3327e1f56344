"""Every layout pair against vLLM's own load_weights of the same HF tensors, bit for bit, on live vLLM parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_rl.reshard.bounds import coverage_errors
from hpc_rl.reshard.plan import make_plan
from hpc_rl.rollout import vllm_compat
from hpc_rl.rollout.vllm import preload
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.megatron_map import megatron_shard_map
from hpc_rl.tensors.shardmap import ShardMap
from tests.ranks import run_ranks
from tests.reshard.layouts import TRAINING, simulate
from tests.rollout import jobs
from tests.rollout.models import CONFIGS
from tests.tensors.models import empty_locals, fill, random_tensors

SIZES = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
MODELS = {kind: CONFIGS[kind] | SIZES for kind in ("qwen2_tied", "qwen3_moe")}
SPECS = {kind: ModelSpec.from_hf_config(config) for kind, config in MODELS.items()}


def loaded(model_dirs: dict[str, str], weights: dict[str, dict[str, torch.Tensor]], tp: int) -> dict[str, Any]:
    """What vLLM's load_weights makes of HF tensors on this rank: kind -> (map of the live model, its parameters)."""
    dist.init_process_group("gloo")
    out = {}
    for kind, model_dir in model_dirs.items():
        engine = jobs.make_engine(model_dir, tp)
        vllm_compat.live_model(engine._core).load_weights(iter(weights[kind].items()))
        shard_map, local = engine.shard_map()
        out[kind] = (shard_map, {name: t.detach().clone().reshape(-1) for name, t in local.items()})
        engine.close()
    return out


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    return {kind: random_tensors(spec) for kind, spec in SPECS.items()}


@pytest.fixture(scope="module")
def live(weights: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Generation tp -> what each rank of one replica holds."""
    preload("cpu")
    torch.set_num_threads(1)
    dirs = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    for kind, folder in dirs.items():
        (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    return {tp: run_ranks(tp, loaded, {k: str(d) for k, d in dirs.items()}, weights, tp) for tp in (1, 2, 4)}


@pytest.mark.parametrize("gen_tp", [1, 2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_every_pair_equals_load_weights(kind: str, gen_tp: int, live: Any, weights: Any) -> None:
    spec = SPECS[kind]
    targets: list[ShardMap] = [live[gen_tp][r % gen_tp][kind][0] for r in range(8)]
    for name, layout in TRAINING.items():
        if layout.ep > 1 and not spec.num_experts:
            continue
        sources = [megatron_shard_map(spec, layout, r, dtype="float32") for r in range(8)]
        plan = make_plan(sources, targets, node_size=4)
        assert plan.received_bytes() == list(plan.lower_bound_bytes) and not coverage_errors(plan, targets)
        held = [empty_locals(m) for m in sources]
        got = [{k: torch.zeros_like(t) for k, t in live[gen_tp][r % gen_tp][kind][1].items()} for r in range(8)]
        for r in range(8):
            fill(sources[r], held[r], weights[kind])
        simulate(plan, held, got)
        for r in range(8):
            for local, value in live[gen_tp][r % gen_tp][kind][1].items():
                assert torch.equal(got[r][local], value), (name, r, local)
