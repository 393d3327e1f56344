"""The parts of a plan by hand, at sizes that no machine here has."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config import Config
from hpc_rl.config_load import load_config
from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import replica_of
from hpc_rl.plan.changes import apply, suggest
from hpc_rl.plan.estimate import forward_flops
from hpc_rl.plan.hardware import GB, GPUS, find_gpu
from hpc_rl.plan.job import PlannedJob, plan_job
from hpc_rl.plan.memory import host_bytes_per_node, memory
from hpc_rl.plan.placement import layout_report, placement_warnings, table_rows
from hpc_rl.plan.published import model_config
from hpc_rl.plan.report import report_of
from hpc_rl.plan.resharding import reshard_plan, reshard_report
from hpc_rl.plan.schedule import bubble, micro_batch_count, schedule_report, schedule_warnings
from hpc_rl.plan.static import local_numels, static_bytes
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.vllm_map import vllm_shard_map
from tests.plan.jobs import QWEN2_1B, SMALL, config_of, job_of, write_70b


@pytest.fixture(scope="module")
def config_70b(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return load_config(write_70b(tmp_path_factory.mktemp("plan")))


def job_70b(config: Config, *changes: str, nodes: int = 16, gpu: str = "h100") -> PlannedJob:
    return plan_job(apply(config, changes), GPUS[gpu], nodes, 8)


# ---- layout -------------------------------------------------------------------------------------------------------


def test_layout_of_70b_on_16_nodes(config_70b: Config) -> None:
    job = job_70b(config_70b)
    layout = layout_report(job)
    assert layout["training"] == {"tp": 8, "pp": 4, "cp": 1, "ep": 1, "dp": 4}
    assert layout["generation"] == {"tp": 8, "replicas": 16}
    assert len(layout["ranks"]) == 128
    assert layout["ranks"][45] == {
        "rank": 45, "node": 5, "gpu": 5, "tp": 5, "pp": 1, "dp": 1, "holds": "layers 20-39", "replica": 5,
        "generation_tp": 5,
    }  # fmt: skip
    assert layout["ranks"][0]["holds"] == "embedding, layers 0-19"
    assert layout["ranks"][127]["holds"] == "layers 60-79, norm, output"
    for rank in layout["ranks"]:
        assert rank["node"] == (rank["pp"] * 4 + rank["dp"])  # a TP group fills a node, a stage four of them
    assert placement_warnings(job) == []


def test_every_parameter_is_somewhere_once_per_replica(config_70b: Config) -> None:
    job = job_70b(config_70b)
    weights = sum(static_bytes(job, "actor", stage).weights for stage in range(4)) * 8
    assert weights == pytest.approx(2 * job.model.num_params, rel=1e-3)  # norms and vocabulary padding are more


@pytest.mark.parametrize(("ranks", "rows"), [(16, 4), (128, 2)])
def test_printed_layout_stays_short(ranks: int, rows: int) -> None:
    config = config_of(QWEN2_1B, dtype="bfloat16", prompts=64, tp=2 if ranks == 128 else 4, pp=2)
    job = job_of(config, ranks, nodes=ranks // 8, gpu="h100")
    table = table_rows(job)
    assert len(table) == rows
    assert table[0]["ranks"].startswith("0-")
    assert table[-1]["ranks"].endswith(f"-{ranks - 1}")


def test_placement_that_crosses_nodes_is_told() -> None:
    config = config_of(QWEN2_1B, dtype="bfloat16", prompts=64, rollout={"tp": 4}, tp=2)
    (warning,) = placement_warnings(job_of(config, 12, nodes=2, gpu="h100"))
    assert re.search(r"rollout\.tp = 4 does not divide the 6 GPUs of a node", warning)
    config = config_of(QWEN2_1B, dtype="bfloat16", prompts=64, tp=2, pp=2)
    (warning,) = placement_warnings(job_of(config, 24, nodes=3, gpu="h100"))
    assert "a pipeline stage has 12 ranks" in warning
    config = config_of(QWEN2_1B, dtype="bfloat16", prompts=64, tp=4)
    with pytest.raises(UserError, match=r"parallel\.tp=4 does not divide the 6 ranks of a node"):
        report_of(job_of(config, 12, nodes=2, gpu="h100"))


# ---- micro-batches ------------------------------------------------------------------------------------------------


def test_micro_batches_by_hand(config_70b: Config) -> None:
    job = job_70b(config_70b)
    got = schedule_report(job)
    # 512 sequences in 4 steps of 128, 32 for each of 4 replicas, two of 2048 tokens in a micro-batch of 4096.
    assert got["optimizer_steps_per_step"] == 4
    assert got["micro_batches_per_optimizer_step"] == 16
    assert got["micro_batches_of_scoring"] == 64
    assert got["bubble_update"] == round(3 / 19, 4)
    assert job.micro_batch_tokens(128) == 4096
    # A budget below one sequence: that sequence alone. Fewer sequences than the budget holds: only those.
    assert job_70b(config_70b, "algorithm.micro_batch_tokens=100").micro_batch_tokens(128) == 2048
    assert job_70b(config_70b, "algorithm.micro_batch_tokens=99999").micro_batch_tokens(8) == 2 * 2048


def test_bubble_is_the_idle_share_of_a_simulated_pipeline() -> None:
    for pp, count in ((1, 3), (4, 4), (8, 2)):
        end = [[0.0] * count for _ in range(pp)]
        for m in range(count):
            for stage in range(pp):
                ready = max(end[stage - 1][m] if stage else 0.0, end[stage][m - 1] if m else 0.0)
                end[stage][m] = ready + 1.0
        assert bubble(pp, count) == pytest.approx(1 - count / end[-1][-1])


def test_ranks_without_work_and_long_bubbles_are_told() -> None:
    config = config_of(QWEN2_1B, dtype="bfloat16", prompts=6, tp=1, pp=2)
    warnings = schedule_warnings(job_of(config, 16, gpu="h100"))
    assert re.search(r"6 sequences for dp = 8: 2 replicas have no work", warnings[0])
    assert re.search(r"wait 50% of an update \(pp = 2, 1 micro-batches\)", warnings[1])


# ---- reshard ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "nodes", "tp", "pp", "generation_tp"), [(16, 2, 4, 2, 2), (8, 1, 2, 2, 1), (4, 1, 4, 1, 4)]
)
def test_reshard_brings_every_rank_what_it_lacks(ranks: int, nodes: int, tp: int, pp: int, generation_tp: int) -> None:
    config = config_of(SMALL, dtype="bfloat16", prompts=64, rollout={"tp": generation_tp}, tp=tp, pp=pp)
    job = job_of(config, ranks, nodes=nodes, gpu="h100")
    plan, report = reshard_plan(job), reshard_report(job)
    received = plan.received_bytes()
    for rank in range(ranks):
        shard = vllm_shard_map(job.model, generation_tp, replica_of(rank, generation_tp, tp)[1], "bfloat16")
        target = 2 * (sum(local_numels(shard).values()) - sum(shard.padding.values()))
        assert received[rank] + sum(link.nbytes for link in plan.local[rank]) == target
    moved = report["inside_nodes_gb"] + report["between_nodes_gb"]
    assert moved == pytest.approx(sum(received) / GB, abs=2e-3)
    between: Counter[tuple[int, int]] = Counter()
    for route in plan.routes:
        between[route.source // job.gpus_per_node, route.target // job.gpus_per_node] += route.nbytes
    far = sum(n for (a, b), n in between.items() if a != b)
    assert report["between_nodes_gb"] == pytest.approx(far / GB, abs=1e-3)
    if pp == 1:
        assert report["received_gb_per_rank"] < 0.05  # same cut: only rows of the vocabulary and of QKV groups move
    busiest = report["busiest_gpu_inside_its_node"]
    assert busiest is None or next(v for k, v in busiest.items() if k != "rank") <= moved


def test_bucket_too_small_is_refused(config_70b: Config) -> None:
    with pytest.raises(UserError, match=r"reshard\.bucket_bytes = 1024 is too small"):
        reshard_report(job_70b(config_70b, "reshard.bucket_bytes=1024"))


# ---- fits, and what to change -------------------------------------------------------------------------------------


def test_70b_on_128_h100_fits_and_says_why(config_70b: Config) -> None:
    report = report_of(job_70b(config_70b))
    assert report["fits"] is True
    assert re.search(r"takes \d+\.\d GB per GPU on pipeline stage \d .* less than 76\.0 GB", report["reason"])
    assert report["changes"] == []
    assert report["peak_gb"] == max(phase["total_gb"] for phase in report["phases"].values())
    # 14 bytes for each of 2 x 70.6 B parameters (the critic has a value head in the output layer's place).
    assert report["checkpoint"]["checkpoint_gb"] == pytest.approx((70.55e9 + 69.50e9) * 14 / GB, rel=0.01)
    assert report["checkpoint"]["shard_files"] == 128
    for name, seconds in report["estimated_seconds"].items():
        assert seconds > 0, name


SHORT: dict[str, tuple[list[str], int, str]] = {
    "too few nodes": ([], 4, "h100"),
    "long micro-batches": (["algorithm.micro_batch_tokens=65536"], 16, "h100"),
    "all of the GPU for vLLM": (["rollout.gpu_memory_utilization=0.9"], 16, "h100"),
    "large KV cache": (["rollout.kv_cache_bytes=60000000000"], 16, "h100"),
    "no room for weights": (["rollout.gpu_memory_utilization=0.2"], 16, "h100"),
    "vLLM awake": (["rollout.sleep_level=0", "algorithm.micro_batch_tokens=16384"], 16, "h100"),
    "small GPU": ([], 32, "a100-40"),
}


@pytest.mark.parametrize("case", SHORT)
def test_what_does_not_fit_is_explained_and_each_change_helps(case: str, config_70b: Config) -> None:
    changes, nodes, gpu = SHORT[case]
    job = job_70b(config_70b, *changes, nodes=nodes, gpu=gpu)
    result = memory(job)
    assert not result.fits
    report = report_of(job)
    assert report["fits"] is False
    assert re.search(r"more than|the KV cache holds", report["reason"])
    assert report["changes"], report["reason"]
    for row in report["changes"]:
        words = row["change"].split()
        more = int(words[words.index("--nodes") + 1]) if "--nodes" in words else nodes
        overrides = [word for word in words if "=" in word]
        changed = memory(job_70b(config_70b, *changes, *overrides, nodes=more, gpu=gpu))
        assert changed.fits, row
        assert row["peak_gb"] == round(changed.peak.nbytes / GB, 2)


def test_no_change_is_invented_where_none_helps() -> None:
    job = job_of(config_of(QWEN2_1B, dtype="bfloat16"), 1, gpu="h100")
    assert suggest(replace(job, gpu=replace(job.gpu, memory_gb=1.0))) == []


def test_kv_cache_that_holds_no_sequence_does_not_fit() -> None:
    with pytest.raises(UserError, match=r"kv_cache_bytes = 1048576 holds 36 tokens, but must hold one sequence .* = 1024"):
        job_of(config_of(QWEN2_1B, dtype="bfloat16", length=1024, rollout={"kv_cache_bytes": 1 << 20}), gpu="h200")
    config = config_of(QWEN2_1B, dtype="bfloat16", length=1024, rollout={"gpu_memory_utilization": 0.02})
    report = report_of(job_of(config, gpu="h200"))
    assert not report["fits"]
    assert re.search(r"the KV cache holds \d+ tokens, less than one sequence of 1024", report["reason"])
    config = config_of(QWEN2_1B, dtype="bfloat16", length=1024, prompts=512, rollout={"kv_cache_bytes": 1 << 30})
    report = report_of(job_of(config, gpu="h200"))
    assert report["fits"]
    assert "holds 36 sequences of full length, and 256 are to run at once" in report["warnings"][0]


def test_host_memory_of_off_load() -> None:
    config = config_of(QWEN2_1B, dtype="bfloat16", rollout={"sleep_level": 1}, offload=True)
    job = job_of(config, 2, gpu="h200")
    parts = host_bytes_per_node(job)
    static = sum(static_bytes(job, role, 0).total for role in job.roles)
    assert parts["off-loaded training state"] == 2 * static
    assert parts["vLLM weights asleep"] == pytest.approx(2 * 2 * job.model.num_params, rel=0.01)
    assert host_bytes_per_node(job_of(config_of(QWEN2_1B), 2, gpu="h200")) == {}


def test_estimate_counts_arithmetic_of_a_forward_pass() -> None:
    job = job_of(config_of(QWEN2_1B, dtype="bfloat16"), gpu="h200")
    spec, n = job.model, 1000
    layer = 2 * (2 * 1536 * 1536 + 2 * 256 * 1536 + 3 * 1536 * 8960)
    scores = 2 * n * 12 * 128  # q k and p v: 4 c h / 2, half of it masked
    assert forward_flops(spec, n, n) == pytest.approx(n * (28 * (layer + scores) + 2 * 1536 * 32768), rel=1e-3)


# ---- input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "memory_gb", "message"),
    [
        ("v100", None, "--gpu = v100: is not in the table"),
        (None, -1.0, "--gpu-memory-gb = -1: must be a positive number"),
        ("h100", float("nan"), "--gpu-memory-gb = nan: must be a positive number"),
    ],
)
def test_unknown_gpu_is_refused(gpu: str | None, memory_gb: float | None, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_gpu(gpu, memory_gb, "auto")


def test_gpu_by_name_or_memory() -> None:
    assert find_gpu(None, None, "auto").name == "h100"
    assert find_gpu("H200", None, "cpu").name == "h200"
    assert find_gpu("h100", 94.0, "auto").memory_gb == 94.0
    assert find_gpu(None, 48.0, "auto").bf16_tflops is None
    assert find_gpu(None, None, "cpu").memory_gb is None


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "ranks": ({"tp": 2, "pp": 3}, 8, "must divide the number of ranks"),
    "heads": ({"tp": 8}, 8, "must divide the model's num_attention_heads"),
    "groups": ({"algorithm": "dapo"}, 1, "rollout.samples_per_prompt = 1"),
    "none": ({}, 0, "--gpus-per-node = 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_refuses_the_plan_refuses(case: str) -> None:
    values, ranks, message = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(message)):
        job_of(config_of(QWEN2_1B, dtype="bfloat16", **values), ranks, gpu="h100")


@pytest.mark.parametrize(
    ("name", "roles", "sequences", "phases"),
    [
        ("sft", ["actor"], 64, ["actor update"]),
        ("dpo", ["actor", "reference"], 128, ["scoring", "actor update"]),
        ("reward_model", ["critic"], 128, ["critic update"]),
    ],
)
def test_objectives_without_rollouts(name: str, roles: list[str], sequences: int, phases: list[str]) -> None:
    config = config_of(QWEN2_1B, dtype="bfloat16", prompts=64, algorithm=name)
    config = replace(config, algorithm=replace(config.algorithm, kl_placement="none"))
    job = job_of(config, 2, gpu="h100")
    report = report_of(job)
    assert list(report["phases"]) == phases
    assert list(job.roles) == roles
    assert report["micro_batches"]["sequences_per_step"] == sequences
    assert report["micro_batches"]["optimizer_steps_per_step"] == 1
    assert not any("vLLM" in part for phase in report["phases"].values() for part in phase["parts_gb"])
    assert report["reshard"] is None
    assert report["generation"] is None
    small = replace(job, gpu=replace(job.gpu, memory_gb=18.0))
    assert {row["change"].split("=")[0] for row in report_of(small)["changes"]} <= {
        "algorithm.micro_batch_tokens", "parallel.recompute", "parallel.tp", "parallel.pp",
    }  # fmt: skip


def test_experts_are_refused() -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    hf = {**QWEN2_1B, "model_type": "qwen3_moe", **experts}
    with pytest.raises(UserError, match="has experts"):
        job_of(config_of(hf, dtype="bfloat16"), gpu="h100")


def test_published_sizes_stand_in_for_a_directory_that_is_not_there(tmp_path: Path) -> None:
    for name, billions in (("Meta-Llama-3.1-70B-Instruct", 70.55), ("Qwen2.5-32B", 32.76), ("Qwen3-8B-Base", 8.19),
                           ("smollm2", 0.1345)):  # fmt: skip
        spec = ModelSpec.from_hf_config(model_config("model.path", str(tmp_path / name)))
        assert spec.num_params == pytest.approx(billions * 1e9, rel=1e-3), name
    with pytest.raises(UserError, match="is not there"):
        model_config("model.path", str(tmp_path / "Llama-3.1-70B-Mine"))
    (tmp_path / "Qwen3-8B").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):  # a directory that is there is read
        model_config("model.path", str(tmp_path / "Qwen3-8B"))


def test_larger_models_of_other_roles_are_counted(tmp_path: Any) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps({**QWEN2_1B, "num_hidden_layers": 14}))
    config = config_of(QWEN2_1B, dtype="bfloat16")
    config = replace(config, model=replace(config.model, critic_path=str(tmp_path)))
    job = job_of(config, gpu="h200")
    assert job.trained["critic"].num_layers == 14
    assert static_bytes(job, "critic", 0).weights < 0.6 * static_bytes(job, "actor", 0).weights


def test_micro_batch_count_matches_the_packing(config_70b: Config) -> None:
    assert micro_batch_count(job_70b(config_70b, "algorithm.micro_batch_tokens=6144")) == 11  # three of 32 at a time
