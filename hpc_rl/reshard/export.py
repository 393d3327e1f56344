"""Exporting from a running job: the model is resharded into whole tensors, dealt over the ranks, and written there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_rl.errors import UserError
from hpc_rl.reshard.connect import Held, connect, raise_on_all
from hpc_rl.tensors.canonical import ModelSpec
from hpc_rl.tensors.hf_export import MAX_FILE_BYTES, begin_export, files_of, finish_export, hf_shard_map, write_file


def export_from_ranks(
    out: str | Path,
    spec: ModelSpec,
    source: Held,
    config: Mapping[str, Any],
    dtype: str,
    tokenizer: str | Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> None:
    """Writes an HF directory from the ranks' tensors. All ranks call it; each writes its share of the files.

    Args:
        out: directory to make, seen by all ranks.
        spec: the model.
        source: (map, local tensors) of this rank.
        config: what config.json shall hold.
        dtype: of the written weights.
        tokenizer: directory whose tokenizer files are copied.
        max_file_bytes: size of a file. A rank holds its files' tensors beside its own while it writes.
        group, timeout_s: of all ranks that hold the model, and the longest wait for one of them.

    Raises:
        UserError: on all ranks, if ``out`` exists or they do not hold the whole model.
    """
    alone = not dist.is_initialized()
    rank, num_ranks = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    raise_on_all(_error(lambda: begin_export(out)) if rank == 0 else "", group)
    files = files_of(spec, dtype, max_file_bytes)
    target = hf_shard_map(spec, files, rank, num_ranks, dtype)
    device = next(iter(source[1].values())).device
    wanted: torch.dtype = getattr(torch, dtype)
    tensors = {name: torch.empty(s.shape, dtype=wanted, device=device) for name, s in target.specs.items()}
    connect(source, (target, tensors), group=group, timeout_s=timeout_s, name=f"export/{out}").sync(0)
    partial = Path(out).with_name(Path(out).name + ".partial")

    def write() -> None:
        for file in list(files)[rank::num_ranks]:
            write_file(partial, file, {name: tensors[name] for name in files[file]})

    raise_on_all(_error(write), group)
    raise_on_all(_error(lambda: finish_export(out, spec, files, config, dtype, tokenizer)) if rank == 0 else "", group)


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return ""
