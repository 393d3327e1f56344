"""What `hpc-rl inspect` shows, as plain data. No torch in here."""

from __future__ import annotations

import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpc_rl.errors import UserError
from hpc_rl.storage import manifest
from hpc_rl.storage.access import open_checkpoint, tensor_from
from hpc_rl.storage.index import Index
from hpc_rl.storage.manifest import Manifest
from hpc_rl.storage.rollout_reader import Record, RolloutFile, read_file
from hpc_rl.storage.tensor_io import itemsize
from hpc_rl.storage.verify import verify as find_damage

Report = dict[str, Any]
MAX_TEXT = 200


def inspect_path(path: str | Path, verify: bool = False, num_samples: int = 4) -> Report:
    """A report on a run directory, a checkpoint, a shard file, or rollouts (a file or the directory of a step).

    Returns: plain values and lists of rows. Raises: UserError for anything else.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory")
    if path.is_file():
        return inspect_file(path, verify, num_samples)
    if (path / "manifest.json").exists():
        return inspect_checkpoint(path, verify)
    if any(path.glob("rank_*.h5")):
        return inspect_rollouts(sorted(path.glob("rank_*.h5")), num_samples)
    if (path / "checkpoints").is_dir() or (path / "rollouts").is_dir():
        return inspect_run(path, verify)
    if path.name.endswith("_complete") or (path / "shards").is_dir():
        raise UserError(f"{path / 'manifest.json'}: missing, so this is no whole checkpoint: use an older checkpoint")
    raise UserError(
        f"{path}: neither a run, a checkpoint, nor rollouts: give RUN or RUN/checkpoints/checkpoint_STEP_complete"
    )


def inspect_file(path: Path, verify: bool, num_samples: int) -> Report:
    """An HDF5 file: a shard, an index or rollouts, which may still be written."""
    if path.parent.name.startswith("step_"):
        return inspect_rollouts([path], num_samples)
    try:
        with h5py.File(path, "r", locking=False) as file:
            kind = str(file.attrs.get("format", ""))
            names = list(file)
    except OSError as error:
        if path.name != "manifest.json":
            raise UserError(f"{path}: not an HDF5 file ({error})") from error
        return inspect_checkpoint(path.parent, verify)
    if kind == "hpc_rl rollouts":
        return inspect_rollouts([path], num_samples)
    if path.name == "index.h5":
        return inspect_checkpoint(path.parent, verify)
    if all(name.startswith("rank_") for name in names):
        return inspect_shard(path, verify)
    raise UserError(f"{path}: an HDF5 file, but not of hpc_rl")


def inspect_run(run_dir: Path, verify: bool) -> Report:
    """Checkpoints and rollouts of a run."""
    rows = []
    for step, path in manifest.complete(run_dir / "checkpoints"):
        try:
            content = manifest.check(path)
            row = {"step": step, "state": "whole", "created": content.created, "ranks": content.world_size}
            row["bytes"] = sum(entry.nbytes for entry in content.files.values())
        except UserError as error:
            row = {"step": step, "state": f"damaged: {error}"}
        if verify and row["state"] == "whole":
            problems = find_damage(path)
            row["state"] = "verified" if not problems else f"damaged: {problems[0]}"
        rows.append(row)
    steps = sorted((run_dir / "rollouts").glob("step_*"))
    rollouts = [{"step": int(p.name[5:]), "files": len(list(p.glob("rank_*.h5")))} for p in steps]
    return {"kind": "run", "path": str(run_dir), "checkpoints": rows, "rollouts": rollouts}


def inspect_checkpoint(path: Path, verify: bool) -> Report:
    """Tensors by component and kind, files, and the small values."""
    path, content, index = open_checkpoint(path)
    report: Report = {
        "kind": "checkpoint", "path": str(path), "step": content.step, "ranks": content.world_size,
        "created": content.created, "schema": manifest.SCHEMA, "bytes": sum(e.nbytes for e in content.files.values()),
    }  # fmt: skip
    if verify:
        problems = find_damage(path)
        report["verified"] = not problems
        report["damage"] = [{"problem": problem} for problem in problems]
    report["contents"] = contents(index)
    report["files"] = [{"file": n, "bytes": e.nbytes, "digest": e.digest} for n, e in content.files.items()]
    report["tensors"] = [
        {"name": n, "shape": list(s.shape), "dtype": s.dtype, "extents": len(rows)}
        for (n, s), rows in zip(index.specs.items(), index.rows(list(index.specs)).values(), strict=True)
    ]
    return report | {"metrics": dict(content.metrics), "extra": dict(content.extra)}


def contents(index: Index) -> list[Report]:
    """One row per component and kind (``actor/param``)."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, spec in index.specs.items():
        row = rows["/".join(name.split("/")[:2]) if name.count("/") > 1 else name.split("/")[0], spec.dtype]
        row[0] += 1
        row[1] += prod(spec.shape)
        row[2] += prod(spec.shape) * itemsize(spec.dtype)
    return [
        {"what": w, "dtype": d, "tensors": n, "elements": e, "bytes": b} for (w, d), (n, e, b) in sorted(rows.items())
    ]


def inspect_shard(path: Path, verify: bool) -> Report:
    """The extents of one shard file; ``verify`` needs the checkpoint around it."""
    rows = []
    with h5py.File(path, "r", locking=False) as file:
        for rank, group in file.items():
            for extent in json.loads(bytes(group["extents.json"][()])):
                row = {
                    "rank": int(rank[5:]),
                    "name": extent["name"],
                    "start": extent["start"],
                    "shape": extent["shape"],
                }
                rows.append(row | {"dtype": extent["dtype"], "first_element": extent["begin"]})
    report: Report = {"kind": "shard", "path": str(path), "bytes": path.stat().st_size}
    if verify:
        root = next((p for p in path.resolve().parents if (p / "manifest.json").exists()), None)
        if root is None:
            raise UserError(
                f"{path}: its digests are in the checkpoint that it belongs to, and no manifest.json is above it"
            )
        problems = find_damage(root, [str(path.resolve().relative_to(root))])
        report |= {"verified": not problems, "damage": [{"problem": problem} for problem in problems]}
    return report | {"extents": rows}


def inspect_rollouts(paths: list[Path], num_samples: int) -> Report:
    """Counts, lengths and scores of a step's sequences, and some of them decoded."""
    files = [read_file(path) for path in paths]
    records = sorted((record for file in files for record in file), key=lambda record: record.key)
    scores = np.array([record.score for record in records])
    known = scores[~np.isnan(scores)]
    report: Report = {
        "kind": "rollouts", "path": str(paths[0] if len(paths) == 1 else paths[0].parent),
        "step": int(files[0].attributes["step"]), "sequences": len(records),
        "tokens": sum(record.num_tokens for record in records),
        "damaged": sum(file.num_damaged for file in files), "score_mean": float(known.mean()) if len(known) else None,
    }  # fmt: skip
    report["files"] = [file_row(path, file) for path, file in zip(paths, files, strict=True)]
    picks = sorted(set(np.linspace(0, len(records) - 1, num_samples).astype(int).tolist())) if records else []
    return report | {"samples": [sample_row(records[i]) for i in picks]}


def file_row(path: Path, file: RolloutFile) -> Report:
    """A row of the table of journals."""
    fields = ", ".join(sorted(file.fields))
    return {"file": path.name, "sequences": len(file), "damaged": file.num_damaged, "added_fields": fields}


def sample_row(record: Record) -> Report:
    """A row of the table of samples: ends of long texts only."""
    row = record.row[0]
    return {
        "prompt_id": record.key[0], "sample_id": record.key[1],
        "score": record.score, "tokens": len(record.response_ids),
        "ended": bool(row["finished"]), "version": int(row["versions"]), "seconds": float(row["seconds"]),
        "prompt": record.texts[0][-MAX_TEXT:], "response": record.texts[1][:MAX_TEXT],
    }  # fmt: skip


def diff_paths(a: str | Path, b: str | Path) -> Report:
    """How two checkpoints differ, tensor by tensor, whatever their layouts."""
    (path_a, content_a, index_a), (path_b, content_b, index_b) = open_checkpoint(a), open_checkpoint(b)
    both = [n for n in index_a.specs if n in index_b.specs and not n.startswith("state/")]
    rows = [row for name in both if (row := diff_tensor(name, path_a, index_a, path_b, index_b))]
    only = [
        {"name": n, "only_in": side}
        for side, ours, theirs in (("a", index_a, index_b), ("b", index_b, index_a))
        for n in ours.specs
        if n not in theirs.specs and not n.startswith("state/")
    ]
    return {
        "kind": "diff", "a": str(path_a), "b": str(path_b), "same": not rows and not only,
        "tensors_compared": len(both), "tensors_that_differ": len(rows), "differences": rows, "only_in_one": only,
        "values": diff_values(content_a, content_b),
    }  # fmt: skip


def diff_tensor(name: str, path_a: Path, index_a: Index, path_b: Path, index_b: Index) -> Report | None:
    """A row where the tensors differ. Equal digests of equal boxes save the reading."""
    spec_a, spec_b = index_a.specs[name], index_b.specs[name]
    if spec_a != spec_b:
        shapes = {"shape": f"{list(spec_a.shape)} / {list(spec_b.shape)}", "dtype": f"{spec_a.dtype} / {spec_b.dtype}"}
        return {"name": name, **shapes}
    if digests(index_a, name) == digests(index_b, name):
        return None
    x, y = (tensor_from(p, i, name, raw=True) for p, i in ((path_a, index_a), (path_b, index_b)))
    different = int((x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")).sum())  # bits: NaN equals itself
    if not different:
        return None
    x, y = (tensor_from(p, i, name).astype(np.float64) for p, i in ((path_a, index_a), (path_b, index_b)))
    row = {"name": name, "shape": list(spec_a.shape), "dtype": spec_a.dtype, "different": different, "of": x.size}
    return row | {"max_abs_difference": float(np.abs(x - y).max())}


def digests(index: Index, name: str) -> dict[Any, bytes]:
    """Box -> digest of the extents of a tensor."""
    return {index.box(row): index.digest[row].tobytes() for row in index.rows([name])[name].tolist()}


def diff_values(a: Manifest, b: Manifest) -> list[Report]:
    """The small values that differ, by their dotted path."""
    flat_a, flat_b = flatten({"step": a.step, "extra": a.extra}), flatten({"step": b.step, "extra": b.extra})
    keys = sorted(flat_a.keys() | flat_b.keys())
    return [{"value": k, "a": flat_a.get(k), "b": flat_b.get(k)} for k in keys if flat_a.get(k) != flat_b.get(k)]


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {prefix: value}
    return {k: v for key, item in items for k, v in flatten(item, f"{prefix}.{key}" if prefix else str(key)).items()}
