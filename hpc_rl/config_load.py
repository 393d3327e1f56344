"""Reads a `Config` from a YAML file and ``section.key=value`` overrides; writes it back; tabulates it.

``python -m hpc_rl.config_load --table`` prints the Markdown table of all keys for the README. What relative paths mean
is told in config_paths.py.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpc_rl.algo.registry import with_defaults
from hpc_rl.config import Config
from hpc_rl.config_check import cross_check
from hpc_rl.config_paths import INPUT_PATHS, OUTPUT_PATHS, expand, find_input, map_paths
from hpc_rl.config_schema import LEAVES, SECTIONS, accepts, choices, default_text, names_below, show, suggest, type_name
from hpc_rl.config_yaml import dump_yaml, parse_yaml, read_yaml
from hpc_rl.errors import UserError

__all__ = ["config_table", "cross_check", "dump_config", "load_config"]

_NOT_FINITE = ("nan", "inf", "infinity")  # words to YAML, which writes .nan and .inf
_RANGE_ERRORS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML file with ``overrides`` (``section.key=value``, value as YAML) on top.

    Args:
        path: YAML file; an empty one means all defaults.
        overrides: later ones win. A key below a mapping may be given too: ``model.config.hidden_size=64``.

    Raises:
        UserError: one line with the value, the rule and the fix; nothing else is raised for wrong input.
    """
    path = Path(path)
    values = read_yaml(path)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {show(values)}, but must be a mapping of keys: write for example `steps: 100`")
    values = {name: _section(name, value) for name, value in values.items()}
    _check_keys(values, str(path))
    values = _resolve_paths(values, path.parent)
    sources: dict[str, str] = {}
    for override in overrides:
        _apply(values, override, sources)
    return _build(values, str(path), sources)


def dump_config(config: Config) -> str:
    """YAML text that `load_config` reads back as an equal `Config`."""
    return dump_yaml(TypeAdapter(Config).dump_python(config))


def config_table() -> str:
    """Markdown table of all keys: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for leaf in LEAVES.values():
        cells = (f"`{leaf.key}`", type_name(leaf.annotation), f"`{default_text(leaf.key)}`", leaf.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _section(name: str, value: Any) -> Any:
    """An empty section means its defaults, ``parallel: auto`` that its values are to be chosen."""
    if name in SECTIONS and value is None:
        return {}
    return {"auto": True} if (name, value) == ("parallel", "auto") else value


def _resolve_paths(values: Mapping[str, Any], config_dir: Path) -> dict[str, Any]:
    """Paths of the file, expanded and found. The copy may be written to: overrides go on top."""
    resolved = {name: dict(value) if name in SECTIONS else value for name, value in values.items()}
    for key in (*INPUT_PATHS, *OUTPUT_PATHS):
        section, _, name = key.rpartition(".")
        holder = resolved.get(section, {}) if section else resolved
        if name in holder:
            holder[name] = map_paths(holder[name], lambda text, key=key: expand(key, text))  # type: ignore[misc]
            if key in INPUT_PATHS:
                holder[name] = map_paths(holder[name], lambda text: find_input(text, config_dir))
    return resolved


def _check_keys(values: Mapping[Any, Any], where: str, prefix: str = "") -> None:
    """Refuses keys that do not exist, offering the nearest ones."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, dict):
            _check_keys(value, where, f"{key}.")
        elif key in SECTIONS:
            raise UserError(
                f"{where}: {key} = {show(value)}, but {key} is a section: set one of its keys: {names_below(key)}"
            )
        elif key not in LEAVES:
            raise UserError(f"{where}: {key} = {show(value)}: there is no key {key}: {suggest(key, value)}")


def _apply(values: dict[str, Any], override: str, sources: dict[str, str]) -> None:
    """Sets one ``section.key=value`` in ``values``, and in ``sources`` who set that key."""
    key, equals, text = override.partition("=")
    key, where = key.strip(), f"override {override!r}"
    if not equals or not key:
        raise UserError(f"{where}: must be section.key=value: write for example steps=10 or parallel.tp=2")
    value = _section(key, parse_yaml(text, where))
    names = key.split(".")
    top = ".".join(names[:2]) if names[0] in SECTIONS else names[0]  # the leaf, of which `key` may name a part
    if top in LEAVES and (key == top or accepts(LEAVES[top].annotation, dict)):
        if key == top:
            value = _as_text(top, value, text.strip())
        sources[top] = where
    elif top in LEAVES:
        raise UserError(
            f"{where}: {top} is {type_name(LEAVES[top].annotation)} and has no keys below it: set {top} itself"
        )
    else:
        nested = value
        for name in reversed(names):
            nested = {name: nested}
        _check_keys(nested, where)
    if key in SECTIONS:
        for name in value:
            _apply_value(values, [key, name], value[name])
            sources[f"{key}.{name}"] = where
    else:
        _apply_value(values, names, value)


def _as_text(key: str, value: Any, text: str) -> Any:
    """For a key that holds text: ``run.dir=2024`` is a name, whatever YAML makes of it. Paths are expanded."""
    if isinstance(value, bool | int | float) and accepts(LEAVES[key].annotation, str):
        value = text if not accepts(LEAVES[key].annotation, type(value)) else value
    return map_paths(value, lambda path: expand(key, path)) if key in (*INPUT_PATHS, *OUTPUT_PATHS) else value


def _apply_value(values: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        below = values.get(name)
        values[name] = values = dict(below) if isinstance(below, dict) else {}
    values[names[-1]] = value


def _build(values: dict[str, Any], path: str, sources: Mapping[str, str]) -> Config:
    _check_types(values, path, sources)
    try:
        return TypeAdapter(Config).validate_python(with_defaults(values))
    except ValidationError as error:
        raise UserError(_explain(error.errors()[0], path, sources)) from None


def _check_types(values: Mapping[str, Any], path: str, sources: Mapping[str, str], prefix: str = "") -> None:
    """What pydantic would quietly convert: true to the number 1, a quoted "2" to 2."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in SECTIONS:
            _check_types(value, path, sources, f"{key}.")
        elif isinstance(value, str) and value.lower().lstrip("+-") in _NOT_FINITE and accepts(LEAVES[key].annotation, float):
            raise UserError(f"{sources.get(key, path)}: {_out_of_range(key, value, 'a finite number')}")
        elif isinstance(value, bool | str) and not accepts(LEAVES[key].annotation, type(value)):
            raise UserError(f"{sources.get(key, path)}: {_wrong_type(key, value)}")


def _explain(error: Any, path: str, sources: Mapping[str, str]) -> str:
    """One line for pydantic's complaint about a value."""
    parts = [str(part) for part in error["loc"]]
    key = ".".join(parts[:2]) if parts[0] in SECTIONS else parts[0]
    value, where = error["input"], sources.get(key, path)
    if error["type"] in _RANGE_ERRORS:
        rule = error["msg"].removeprefix("Input should be ")
        return f"{where}: {_out_of_range(key, show(value), rule)}"
    if error["type"] == "literal_error":
        close = difflib.get_close_matches(str(value), choices(LEAVES[key].annotation), 1)
        fix = f"did you mean {close[0]}?" if close else f"the default is {default_text(key)}"
        return f"{where}: {key} = {show(value)}: must be {type_name(LEAVES[key].annotation)}: {fix}"
    return f"{where}: {_wrong_type(key, value)}"


def _out_of_range(key: str, value: str, rule: str) -> str:
    return f"{key} = {value} is out of range: it must be {rule}; the default is {default_text(key)}"


def _wrong_type(key: str, value: Any) -> str:
    kind = "null" if value is None else type(value).__name__
    annotation = LEAVES[key].annotation
    quoted = accepts(annotation, str) and not choices(annotation) and not isinstance(value, dict | list)
    fix = "put it in quotes" if quoted and value is not None else f"the default is {default_text(key)}"
    return f"{key} = {show(value)} has the wrong type ({kind}): must be {type_name(annotation)}: {fix}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        sys.exit("usage: python -m hpc_rl.config_load --table   (prints the Markdown table of all config keys)")
    print(config_table(), end="")
