"""Output that is either there as a whole or not at all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpc_rl.errors import UserError


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A scratch directory beside ``target`` that takes its name when the block ends, and is removed if it raises.

    Args:
        target: final name; what stands there is replaced by two renames, so a reader sees the old, none, or the new.
    """
    scratch = _scratch(target, lambda where: Path(tempfile.mkdtemp(dir=where, prefix=f".{target.name}-")))
    try:
        yield scratch
        _open_to_readers(scratch)
        old = target.with_name(f"{scratch.name}.old")
        if target.exists():
            os.rename(target, old)
        os.rename(scratch, target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_whole(target: Path, text: str) -> None:
    """Writes a UTF-8 file under another name and renames it."""
    scratch = _scratch(target, lambda where: where / f".{target.name}-{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def require_packages(what: str, packages: Mapping[str, str]) -> None:
    """Refuses to go on without packages.

    Args:
        what: what needs them, for the message.
        packages: module -> what pip installs it by.
    Raises: UserError with the pip command.
    """
    missing = [pip for module, pip in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(
            f"{what} needs {', '.join(missing)}, not installed here: run `pip install --no-deps {' '.join(missing)}`"
        )


def _scratch(target: Path, make: Callable[[Path], Path]) -> Path:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return make(target.parent)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror}): choose another place") from None


def _open_to_readers(directory: Path) -> None:
    """Gives what mkdtemp and safetensors made private the rights that the umask grants."""
    mask = os.umask(0)
    os.umask(mask)
    directory.chmod(0o777 & ~mask)
    for file in directory.iterdir():
        file.chmod(0o666 & ~mask)
