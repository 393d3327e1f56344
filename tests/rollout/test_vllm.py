"""vLLM in forked processes: against Hugging Face, over layouts, and as a guest in the trainer's process."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import generation_order, replica_of
from hpc_rl.rollout.vllm import preload
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.coverage import check_local_coverage, covered_numel
from hpc_rl.tensors.shardmap import ShardMap
from hpc_rl.tensors.vllm_map import vllm_shard_map
from tests.ranks import RankFailed, run_ranks
from tests.rollout import jobs
from tests.rollout.models import CONFIGS, EOS, canonical, character_tokenizer, greedy, hf_model, log_probs, write_model

pytestmark = pytest.mark.xdist_group("vllm")
KINDS = tuple(CONFIGS)
# (world size, tensor-parallel size, that of training); with 4, two ranks hold each KV head, and one has 4 of its 32
# vocabulary rows; (4, 2, 4): replicas of ranks 0 and 2, 1 and 3
LAYOUTS = ((1, 1, 1), (2, 2, 2), (2, 1, 1), (4, 4, 4), (4, 2, 4))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload("cpu")
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model_dirs(root: Path) -> dict[str, str]:
    return {kind: write_model(root, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def hf(root: Path) -> dict[str, list[Any]]:
    """Two versions of each model."""
    return {kind: [hf_model(kind, seed) for seed in (0, 1)] for kind in KINDS}


@pytest.fixture(scope="module")
def weights(hf: dict[str, list[Any]]) -> dict[str, list[dict[str, torch.Tensor]]]:
    return {kind: [canonical(model) for model in versions] for kind, versions in hf.items()}


@pytest.fixture(scope="module")
def runs(model_dirs: Any, weights: Any) -> dict[tuple[int, int, int], list[Any]]:
    """Layout -> results of each rank."""
    return {
        (world, tp, train_tp): run_ranks(
            world, jobs.everything, {k: model_dirs[k] for k in _kinds(tp)}, weights, tp, train_tp, timeout_s=300
        )
        for world, tp, train_tp in LAYOUTS
    }


@pytest.fixture(scope="module")
def hf_greedy(hf: dict[str, list[Any]]) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """(kind, version) -> the continuation of each prompt."""
    return {
        (kind, version): [greedy(model, p.input_ids, jobs.LIMIT) for p in jobs.prompts()]
        for kind, versions in hf.items()
        for version, model in enumerate(versions)
    }


def _kinds(tp: int) -> list[str]:
    return [*KINDS] if tp < 4 else ["qwen2_tied"]  # 4 ranks are slow on 2 cores


CASES = [(layout, kind) for layout in LAYOUTS for kind in _kinds(layout[1])]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_greedy_equals_hf_before_and_after_an_update(runs: Any, hf_greedy: Any, layout: Any, kind: str) -> None:
    for version in (0, 1):
        samples = _all_samples(runs[layout], layout, kind, ("greedy", version))
        assert [s.request.group_id for s in samples] == list(range(len(jobs.LENGTHS)))
        for s, expected in zip(samples, hf_greedy[kind, version], strict=True):
            assert s.response_ids == expected
            assert s.finished == (expected[-1] == EOS)
            assert s.version == version


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_log_probs_are_those_of_the_tempered_distribution(runs: Any, hf: Any, layout: Any, kind: str) -> None:
    for version in (0, 1):
        for s in _all_samples(runs[layout], layout, kind, ("sampled", version)):
            expected = log_probs(hf[kind][version], s.request.prompt.input_ids, s.response_ids, jobs.TEMPERATURE)
            torch.testing.assert_close(torch.tensor(s.log_probs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_do_not_depend_on_the_layout(runs: Any, kind: str) -> None:
    one = _all_samples(runs[1, 1, 1], (1, 1, 1), kind, ("sampled", 0))
    for layout in LAYOUTS:
        if kind in _kinds(layout[1]):
            other = _all_samples(runs[layout], layout, kind, ("sampled", 0))
            assert [s.response_ids for s in other] == [s.response_ids for s in one]


def _all_samples(ranks: list[Any], layout: tuple[int, int, int], kind: str, key: Any) -> list[Any]:
    """Of all replicas; the ranks of a replica agree to the bit."""
    world, tp, train_tp = layout
    samples = []
    for begin in range(0, world, tp):
        replica = generation_order(world, tp, train_tp)[begin : begin + tp]
        found = [[(s.response_ids, s.log_probs) for s in ranks[rank][kind][key]] for rank in replica]
        assert all(x == found[0] for x in found)
        samples += ranks[replica[0]][kind][key]
    return samples


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_the_live_map_is_whole_and_equals_the_one_worked_out(runs: Any, weights: Any, layout: Any, kind: str) -> None:
    world, tp, train_tp = layout
    spec = ModelSpec.from_hf_config({**CONFIGS[kind], "dtype": "float32"})
    boxes: dict[str, list[Any]] = {}
    for rank in range(world):
        live = runs[layout][rank][kind]
        check_local_coverage(live["map"], live["numels"])
        assert live["padding_is_zero"]
        assert _contents(live["map"]) == _contents(vllm_shard_map(spec, tp, replica_of(rank, tp, train_tp)[1]))
        for piece in live["map"].pieces if replica_of(rank, tp, train_tp)[0] == 0 else ():
            boxes.setdefault(piece.name, []).append((piece.start, piece.shape))
    assert {name: covered_numel(b) for name, b in boxes.items()} == {n: w.numel() for n, w in weights[kind][0].items()}


def _contents(shard_map: ShardMap) -> Any:
    local = lambda name: name.replace(".routed_experts", "")  # noqa: E731
    pieces = Counter((p.name, p.start, p.shape, local(p.local), p.offset, p.strides) for p in shard_map.pieces)
    return pieces, dict(shard_map.specs), {local(n): k for n, k in shard_map.padding.items()}


def test_process_groups_outlive_the_engine(runs: Any) -> None:
    assert all(result["ranks"] == world for (world, *_), ranks in runs.items() for result in ranks)


@pytest.fixture(scope="module")
def manners(model_dirs: Any, weights: Any) -> dict[str, Any]:
    return run_ranks(1, jobs.manners, model_dirs["qwen2_tied"], weights["qwen2_tied"][0])[0]


def test_a_seed_gives_the_same_tokens_in_any_company(manners: Any) -> None:
    ids = [s.response_ids for s in manners["all"]]
    assert [s.response_ids for s in manners["alone"]] == ids
    assert [s.response_ids for s in manners["backwards"]] == ids[::-1]
    assert [s.response_ids for s in manners["after"]] == ids
    assert [s.response_ids for s in manners["after_wake"]] == ids
    assert [s.response_ids for s in manners["crowded"]] == ids
    other = [s.response_ids for s in manners["other_seed"]]
    assert all(a != b for a, b in zip(ids, other, strict=True))
    assert len(set(ids)) == len(ids)


def test_the_trainer_sees_nothing_of_vllm(manners: Any) -> None:
    assert manners["changed_by_start"] == []
    assert manners["changed_by_generate"] == []
    assert manners["callback_draws"]  # a callback draws from the trainer's generators


def test_samples_surface_while_others_run(manners: Any) -> None:
    lengths = [length for _, _, length in manners["events"]]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert all(s.seconds > 0 for s in manners["all"])


def test_prompts_that_do_not_fit_are_named(manners: Any) -> None:
    refused = manners["refused"]
    assert refused["fits"] == "accepted"
    assert "prompt 7: 105 tokens + rollout.max_response_tokens 24 = 129, but the engine holds 128" in refused["long"]
    assert "prompt 7 has no tokens" in refused["empty"]
    assert "token id 100, but the model's vocabulary has 100" in refused["id"]


def test_weights_cannot_change_while_requests_run(manners: Any) -> None:
    assert "weights changed to version 4 while vLLM still generates" in manners["interrupted"]


@pytest.fixture(scope="module")
def sampling(model_dirs: Any, weights: Any) -> dict[str, Any]:
    return run_ranks(1, jobs.sampling, model_dirs["llama"], weights["llama"][0])[0]


@pytest.mark.parametrize("setting", ["plain", "top_p", "top_k", "few"])
def test_log_probs_ignore_the_cut_of_the_vocabulary(sampling: Any, hf: Any, setting: str) -> None:
    for s in sampling[setting]:
        expected = log_probs(hf["llama"][0], s.request.prompt.input_ids, s.response_ids, jobs.TEMPERATURE)
        torch.testing.assert_close(torch.tensor(s.log_probs), expected, rtol=0, atol=1e-4)


def test_the_cut_restricts_what_is_sampled(sampling: Any, hf: Any) -> None:
    for s in sampling["top_k"]:
        with torch.no_grad():
            ids = torch.tensor([s.request.prompt.input_ids + s.response_ids])
            logits = hf["llama"][0](ids).logits[0, len(s.request.prompt.input_ids) - 1 : -1]
        best = logits.topk(3).indices
        assert all(token in best[i].tolist() for i, token in enumerate(s.response_ids))
    assert [s.response_ids for s in sampling["top_k"]] != [s.response_ids for s in sampling["plain"]]


def test_order_and_tokens_with_few_sequences_at_once(sampling: Any) -> None:
    assert [s.response_ids for s in sampling["few"]] == [s.response_ids for s in sampling["plain"]]
    assert [s.request for s in sampling["few"]] == jobs.requests(4)


def test_stop_strings_end_a_response_at_their_last_token(sampling: Any) -> None:
    tokenizer, stopped = character_tokenizer(), 0
    for cut, whole in zip(sampling["stop"], sampling["plain"], strict=True):
        texts = [tokenizer.decode(whole.response_ids[:n]) for n in range(1, len(whole.response_ids) + 1)]
        first = next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in jobs.STOP)), None)
        assert cut.response_ids == whole.response_ids[:first]
        assert cut.finished == (whole.finished or first is not None)
        assert cut.log_probs == pytest.approx(whole.log_probs[: len(cut.log_probs)], abs=1e-4)
        stopped += first is not None
    assert 0 < stopped < len(sampling["plain"])


def test_texts_are_the_sampled_ids_without_special_tokens(sampling: Any) -> None:
    for s in sampling["plain"]:
        assert s.text == "".join(
            {EOS: "", 4: "<x>", 2: "<bos>", 1: "", 0: ""}.get(i, chr(i + 27)) for i in s.response_ids
        )
    assert any(s.response_ids[-1] == EOS for s in sampling["plain"])
    assert all(EOS not in s.response_ids[:-1] for s in sampling["plain"])


def test_settings_that_cannot_work_are_refused(root: Path, model_dirs: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(CONFIGS, "heads", {**CONFIGS["llama"], "head_dim": 16})
    said = run_ranks(2, jobs.refusals, {**model_dirs, "heads": write_model(root, "heads")})[0]
    assert "0.weight [4, 2, 3] belongs to layer class Bilinear" in said["class"]
    assert "needs a tokenizer" in said["stop"]
    assert "rollout.tp=3 does not divide the world size 2" in said["tp"]
    assert "head size 16" in said["head_size"]
    assert said["memory"].startswith("rollout.kv_cache_bytes = 16384")
    assert "rollout.max_response_tokens = 128: raise rollout.kv_cache_bytes" in said["memory"]
    assert said["block"].startswith("rollout.block_size = 16 is refused by vLLM") and "null" in said["block"]
    assert said["one_sequence"] == "accepted"  # room for one sequence at full length is the least
    assert said["default_memory"] == str(64 * 128 * 2 * 2 * 32 * 2 * 4 + 128 * 2 * 2 * 32 * 2 * 4)
    assert issubclass(UserError, ValueError)


def test_jobs_side_by_side_and_after_a_killed_one(model_dirs: Any, weights: Any) -> None:
    arguments = (model_dirs["llama"], weights["llama"][0])
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(2, jobs.generate_and_die, *arguments)
    left: set[str] = set()
    for _ in range(50):  # other jobs on this machine have such names too, for a moment
        left = {name for name in os.listdir("/dev/shm") if "hpcrl" in name} - before
        if not left:
            break
        time.sleep(0.1)
    assert not left
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run_ranks, 2, jobs.generate_twice, *arguments) for _ in range(2)]
        results = [response for job in running for response in job.result()]
    assert all(response == results[0] for response in results)
