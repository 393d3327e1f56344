"""Whole runs: the lock is looked at, what is printed is what was loaded, and a save beside the next step is exact."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from hpc_rl.storage import checkpoint, host_copy, manifest
from tests.ranks import run_ranks
from tests.storage.one_rank import steps
from tests.storage.runs import generators, overlapping_saves, refusal, resume, train_without_lock
from tests.train.supervised import CONFIGS, config_of

pytestmark = pytest.mark.xdist_group("train")


def test_a_job_whose_lock_is_gone_stops_on_all_ranks_and_saves_no_more(tmp_path: Path) -> None:
    config = config_of("sft", tmp_path, steps=4, checkpoint__every=1)
    (first, steps_first), (second, steps_second) = run_ranks(2, train_without_lock, config, 3)
    assert f"{tmp_path}/lock: removed" in first and "this job must stop" in first
    assert second == f"rank 0 failed: RunError: {first}"
    assert steps_first == steps_second == 3
    assert steps(tmp_path) == [1, 2], "step 3 is not saved: another job may write there"


def test_the_checkpoint_that_was_loaded_is_named_not_the_damaged_one(tmp_path: Path) -> None:
    config = partial(config_of, "sft", tmp_path, steps=3, checkpoint__every=1, checkpoint__keep_last=9)
    weights = run_ranks(1, overlapping_saves, config())[0]
    shard = tmp_path / "checkpoints" / "checkpoint_3_complete" / "shards" / "rank_00000.h5"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    printed, began_after, loaded = run_ranks(1, resume, config(resume="auto"))[0]
    assert printed.count("Resume: going on from") == 1
    assert "checkpoint_2_complete" in printed and "checkpoint_3_complete" not in printed
    assert began_after == 2 and loaded == weights[1]


def test_a_checkpoint_holds_its_config_and_refuses_another_tokenizer(tmp_path: Path) -> None:
    config = partial(config_of, "sft", tmp_path / "run", steps=1, resume="auto")
    run_ranks(1, overlapping_saves, config())
    path = tmp_path / "run" / "checkpoints" / "checkpoint_1_complete"
    saved = manifest.read(path).extra["config"]
    assert (saved["steps"], saved["algorithm"]["name"]) == (1, "sft")
    other = tmp_path / "other"
    shutil.copytree(CONFIGS / "quickstart" / "model", other)
    assert run_ranks(1, refusal, config(model__tokenizer=other))[0] == "", "the same files elsewhere are the same"
    text = (other / "tokenizer_config.json").read_text()
    (other / "tokenizer_config.json").write_text(text.rstrip()[:-1] + ', "model_max_length": 77}')
    for error in run_ranks(2, refusal, config(model__tokenizer=other)):
        assert error.startswith(f"{path}: saved with another tokenizer") and "\n" not in error


def test_the_step_beside_a_save_does_not_change_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*args: object) -> None:
        time.sleep(0.3)  # by then an unfenced step would have changed the weights
        host_copy.fill(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "fill", late)
    config = partial(config_of, "sft", tmp_path, steps=3, checkpoint__every=1, checkpoint__keep_last=9)
    weights = run_ranks(1, overlapping_saves, config())[0]
    for step in (1, 2, 3):
        path = tmp_path / "checkpoints" / f"checkpoint_{step}_complete"
        assert run_ranks(1, resume, config(resume=str(path)))[0][1:] == (step, weights[step - 1])


def test_the_generators_of_each_rank_go_on_where_they_were(tmp_path: Path) -> None:
    config = partial(config_of, "sft", tmp_path)
    run_ranks(2, generators, config(steps=1), 3)
    resumed = run_ranks(2, generators, config(steps=2, resume="auto"), 3)
    undisturbed = run_ranks(2, generators, config_of("sft", tmp_path / "whole", steps=2), 3)
    assert resumed == undisturbed
    assert resumed[0] != resumed[1], "the ranks draw differently"
