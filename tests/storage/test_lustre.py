"""Striping: which file system, which command."""

from __future__ import annotations

from pathlib import Path

from hpc_rl.storage.lustre import file_system, setstripe_command, stripe
from tests.storage.small_disk import small_disk

MOUNTS = """/dev/sda / ext4 rw 0 0
10.0.0.1@o2ib:/scratch /scratch lustre rw,flock 0 0
tmpfs /scratch/local tmpfs rw 0 0
nfs:/a /my\\040data nfs rw 0 0"""


def test_the_longest_mount_decides() -> None:
    found = [
        file_system(Path(p), MOUNTS) for p in ("/home/x", "/scratch/run", "/scratch/local/x", "/my data/y", "/scratchy")
    ]
    assert found == ["ext4", "lustre", "tmpfs", "nfs", "ext4"]


def test_a_real_mount_is_recognised(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as mounted:
        assert not mounted or file_system(tmp_path / "disk" / "run") == "tmpfs"


def test_the_command() -> None:
    assert setstripe_command(Path("/s/run"), -1, 1 << 20) == ["lfs", "setstripe", "-c", "-1", "-S", "1048576", "/s/run"]
    assert setstripe_command(Path("/s/run"), 4, 4096)[5] == "65536", "stripes are multiples of 64 KiB"


def test_elsewhere_nothing_is_run(tmp_path: Path) -> None:
    assert not stripe(tmp_path, -1, 1 << 20)
