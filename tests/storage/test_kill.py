"""A save killed, or failing, at any of its operations: a whole checkpoint is always there, and the next save works."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.storage import manifest
from hpc_rl.storage.files import Files
from tests.storage.faulty import fail_at, in_child, kill_at, newest, num_operations, save


def first(run_dir: Path, files: Files) -> None:
    save(run_dir, 1, files)


def second(run_dir: Path, files: Files) -> None:
    save(run_dir, 2, files)


def pruning(run_dir: Path, files: Files) -> None:
    save(run_dir, 2, files, keep_last=1)


def again(run_dir: Path, files: Files) -> None:
    save(run_dir, 1, files)


def rewound(run_dir: Path, files: Files) -> None:
    """A run that went back to step 1 while 3 was there saves step 2: 3 is of a future that was given up."""
    save(run_dir, 2, files)


class NoExchange(Files):
    """A file system without renameat2."""

    def exchange(self, a: Path, b: Path) -> bool:
        return False


# what is saved before; the save that is killed; steps that may be found afterwards
CASES: list[tuple[list[int], Callable[[Path, Files], None], set[int | None]]] = [
    ([], first, {None, 1}),
    ([1], second, {1, 2}),
    ([1], pruning, {1, 2}),
    ([1], again, {1}),
    ([1, 3], rewound, {1, 2, 3}),
]


def prepare(template: Path, before: list[int]) -> None:
    for step in before:
        save(template, step, Files())


@pytest.mark.parametrize(("before", "killed", "allowed"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_sigkill_at_every_operation(
    fast_dir: Path, before: list[int], killed: Callable[[Path, Files], None], allowed: set[int | None]
) -> None:
    template, run_dir = fast_dir / "template", fast_dir / "run"
    template.mkdir()
    prepare(template, before)
    shutil.copytree(template, run_dir)
    total = num_operations(lambda files: killed(run_dir, files))
    assert total > 50
    found = set()
    for n in range(total):
        shutil.rmtree(run_dir)
        shutil.copytree(template, run_dir)
        assert in_child(killed, run_dir, kill_at(n)) == -9
        step = newest(run_dir)
        assert step in allowed, f"killed at operation {n} of {total}"
        found.add(step)
        if n % 8 == 0:
            assert in_child(save, run_dir, 4, Files(), 1) == 0
            assert newest(run_dir) == 4
            assert sorted(path.name for path in run_dir.glob("checkpoints/*_partial_*")) == []
            assert [step for step, _ in manifest.complete(run_dir / "checkpoints")] == [4]
    assert found == allowed, "both sides of the rename were seen"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_an_error_at_every_operation_loses_nothing_and_prunes_nothing(fast_dir: Path, code: int) -> None:
    template, run_dir = fast_dir / "template", fast_dir / "run"
    template.mkdir()
    prepare(template, [1])
    shutil.copytree(template, run_dir)
    total = num_operations(lambda files: pruning(run_dir, files))
    failed = 0
    for n in range(0, total, 2):
        shutil.rmtree(run_dir)
        shutil.copytree(template, run_dir)
        errors = save(run_dir, 2, fail_at(n, code), keep_last=1)
        if any(errors):
            failed += 1
            assert newest(run_dir) == 1, f"operation {n} of {total}"
            assert save(run_dir, 2, Files(), keep_last=1, serial=1) == [None, None]
        assert newest(run_dir) == 2
    assert failed > 20


def test_without_renameat2_a_step_is_still_saved_again(tmp_path: Path) -> None:
    assert save(tmp_path, 1, NoExchange()) == [None, None]
    assert save(tmp_path, 1, NoExchange()) == [None, None]
    assert newest(tmp_path) == 1
    assert len(list(tmp_path.glob("checkpoints/checkpoint_1_superseded_*"))) == 1
