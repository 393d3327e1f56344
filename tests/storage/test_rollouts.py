"""The rollouts journal: whole sequences only, at any moment, and nothing twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpc_rl.rollout.protocol import Prompt, Request, Sample
from hpc_rl.storage.h5_snapshot import lookup3
from hpc_rl.storage.rollout_reader import RolloutReader, finished_samples, read_file, rollout_file
from hpc_rl.storage.rollouts import RolloutWriter, add_fields


def make_sample(prompt_id: int, sample_id: int = 0) -> Sample:
    rng = np.random.default_rng([prompt_id, sample_id])
    prompt = Prompt(prompt_id, tuple(rng.integers(0, 99, rng.integers(1, 5)).tolist()), f"größe {prompt_id}?")
    response = tuple(rng.integers(0, 99, rng.integers(0, 40)).tolist())
    log_probs = tuple(np.float32(-rng.random(len(response))).tolist())
    request = Request(prompt, prompt_id, sample_id, int(rng.integers(0, 2**63)))
    return Sample(request, response, log_probs, bool(rng.random() < 0.5), 3, f"→ {response}", 0.25)


def test_each_sequence_is_readable_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 5, 0) as writer:
        for i in range(20):
            writer.append(make_sample(i), score=i / 3)
            records = finished_samples(tmp_path, 5)
            assert list(records) == [(n, 0) for n in range(i + 1)]
            sample = make_sample(i)
            assert records[i, 0].sample(sample.request) == sample
            assert records[i, 0].score == i / 3


def test_plain_h5py_reads_it(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 0, 0) as writer:
        writer.append(make_sample(1))
        writer.append(make_sample(2), score=1.0)
    with h5py.File(rollout_file(tmp_path, 0, 0), "r") as file:
        first, second = make_sample(1), make_sample(2)
        ends = file["sequences"]["token_end"]
        assert file["input_ids"][ends[0] : ends[1]].tolist() == [*second.request.prompt.input_ids, *second.response_ids]
        assert ends[0] == len(first.request.prompt.input_ids) + len(first.response_ids)
        assert file["sequences"]["scores"][1] == 1.0 and np.isnan(file["sequences"]["scores"][0])


def test_a_record_answers_only_the_request_that_it_was_drawn_for(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 0, 0) as writer:
        writer.append(make_sample(1))
    record = finished_samples(tmp_path, 0)[1, 0]
    request = make_sample(1).request
    assert record.sample(Request(request.prompt, 1, 0, request.seed + 1)) is None
    assert record.sample(make_sample(2).request) is None


CHILD = """
import sys
from pathlib import Path
from tests.storage.test_rollouts import make_sample
from hpc_rl.storage.rollouts import RolloutWriter
writer = RolloutWriter(sys.argv[1], 7, 0)
for i in range(100000):
    writer.append(make_sample(i))
    print(i, flush=True)
"""


def test_every_finished_sequence_survives_sigkill_and_the_next_writer_goes_on(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for attempt in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, cwd=root, text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert process.stdout
        process.stdout.readline()
        time.sleep(0.05 + 0.03 * attempt)
        process.send_signal(signal.SIGKILL)
        told = [0, *(int(line) for line in process.stdout.read().split("\n")[:-1])]
        process.wait()
        records = finished_samples(tmp_path, 7)
        assert len(records) >= told[-1] + 1
        for (i, _), record in records.items():
            assert record.sample(make_sample(i).request) == make_sample(i)
    before = set(finished_samples(tmp_path, 7))
    with RolloutWriter(tmp_path, 7, 0) as writer:
        writer.append(make_sample(10**6))
    assert set(finished_samples(tmp_path, 7)) == before | {(10**6, 0)}


def test_a_reader_beside_a_busy_writer_always_sees_whole_sequences(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.DEVNULL, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    path = rollout_file(tmp_path, 7, 0)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = 0
        for _ in range(40):
            content = read_file(path)
            assert content.num_damaged == 0 and len(content) >= seen
            assert [record.key[0] for record in content] == list(range(len(content)))
            seen = len(content)
            with h5py.File(path, "r", libver="latest", swmr=True, locking=False) as file:
                assert len(file["sequences"]) >= seen, "plain h5py sees them too"
        assert seen > 0
    finally:
        process.kill()
        process.wait()


def test_lookup3_is_hdf5s_metadata_checksum() -> None:
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551, "as lookup3.c states it"


def test_a_changed_key_discards_what_was_drawn_under_another(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 1, 0, key="temperature 1") as writer:
        writer.append(make_sample(1))
    assert finished_samples(tmp_path, 1, key="temperature 2") == {}
    with RolloutWriter(tmp_path, 1, 0, key="temperature 2") as writer:
        writer.append(make_sample(2))
    assert list(finished_samples(tmp_path, 1, key="temperature 2")) == [(2, 0)]


def test_a_flipped_bit_drops_that_sequence_only(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 1, 0) as writer:
        for i in range(4):
            writer.append(make_sample(i))
    path = rollout_file(tmp_path, 1, 0)
    with h5py.File(path, "r+", locking=False) as file:
        file["input_ids"][int(file["sequences"]["token_end"][1])] += 1  # first token of sequence 2
    content = read_file(path)
    assert content.num_damaged == 1
    assert [record.key[0] for record in content] == [0, 1, 3]


def test_random_damage_loses_sequences_but_never_changes_one(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 1, 0) as writer:
        for i in range(30):
            writer.append(make_sample(i))
    path = rollout_file(tmp_path, 1, 0)
    original = path.read_bytes()
    rng = random.Random(0)
    outcomes = set()
    used = [i for i, byte in enumerate(original) if byte]
    for i in range(200):
        damaged = bytearray(original)
        damaged[rng.choice(used) if i % 2 else rng.randrange(len(original))] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        found = finished_samples(tmp_path, 1)
        for (i, _), record in found.items():
            assert record.sample(make_sample(i).request) == make_sample(i)
        outcomes.add("all" if len(found) == 30 else "none" if not found else "some")
    assert outcomes == {"all", "some", "none"}


def test_an_unreadable_journal_is_set_aside(tmp_path: Path) -> None:
    path = rollout_file(tmp_path, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not hdf5")
    with RolloutWriter(tmp_path, 1, 0) as writer:
        writer.append(make_sample(1))
    assert list(finished_samples(tmp_path, 1)) == [(1, 0)]
    assert path.with_suffix(".damaged").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_fields_of_the_finished_step_lie_beside_their_tokens(tmp_path: Path, world_size: int) -> None:
    samples = [make_sample(i) for i in range(6)]
    for rank in range(2):
        with RolloutWriter(tmp_path, 2, rank) as writer:
            for i in range(rank, 6, 2):
                writer.append(samples[i])
    lengths = [len(s.request.prompt.input_ids) + len(s.response_ids) for s in samples]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    advantages = np.arange(cu_seqlens[-1], dtype=np.float32)
    for rank in range(world_size):
        add_fields(tmp_path, 2, rank, world_size, [(i, 0) for i in range(6)], cu_seqlens, {"advantages": advantages})
    for file in RolloutReader(tmp_path, 2).files():
        for record, begin in zip(file, file.fields["cu_seqlens"], strict=False):
            i = record.key[0]
            got = file.fields["advantages"][begin : begin + lengths[i]]
            assert got.tolist() == advantages[cu_seqlens[i] : cu_seqlens[i + 1]].tolist()
            mask = file.fields["response_mask"][begin : begin + lengths[i]]
            assert mask.sum() == len(samples[i].response_ids)
            assert record.sample(samples[i].request) == samples[i]
