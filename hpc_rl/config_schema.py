"""What keys the configuration has: types, defaults and meanings, taken from the classes of config.py."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hpc_rl.config import Config
from hpc_rl.config_yaml import dump_yaml

_NAMES = {bool: "true or false", int: "integer", float: "number", str: "string", type(None): "null", dict: "mapping"}


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One key of the configuration."""

    key: str
    annotation: Any
    default: Any
    meaning: str


def leaves(cls: type = Config, prefix: str = "") -> Iterator[Leaf]:
    """All leaf keys, in the order of the classes."""
    hints = get_type_hints(cls)
    for name, info in cls.__pydantic_fields__.items():  # type: ignore[attr-defined]
        annotation = hints[name]
        if dataclasses.is_dataclass(annotation):
            yield from leaves(annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield Leaf(prefix + name, annotation, info.get_default(call_default_factory=True), info.description or "")


LEAVES = {leaf.key: leaf for leaf in leaves()}
SECTIONS = tuple(dict.fromkeys(key.split(".")[0] for key in LEAVES if "." in key))


def options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def choices(annotation: Any) -> list[str]:
    """The values of a Literal, as text; empty for other types."""
    return [str(value) for option in options(annotation) if get_origin(option) is Literal for value in get_args(option)]


def accepts(annotation: Any, kind: type) -> bool:
    """Whether a value of exactly type ``kind`` fits ``annotation``."""
    for option in options(annotation):
        if get_origin(option) is Literal:
            if any(type(value) is kind for value in get_args(option)):
                return True
        elif (get_origin(option) or option) is kind or (option is float and kind is int):
            return True
    return False


def type_name(annotation: Any) -> str:
    """The type in words: ``integer or null``, ``cpu, cuda``."""
    names = []
    for option in options(annotation):
        origin = get_origin(option)
        if origin is Literal:
            names.append("one of " + ", ".join(str(value) for value in get_args(option)))
        elif origin is list:
            names.append("list of strings")
        else:
            names.append(_NAMES[origin or option])
    return " or ".join(names)


def default_text(key: str) -> str:
    """The default of a leaf, as its YAML text on one line."""
    return dump_yaml(LEAVES[key].default).removesuffix("...\n").strip()


def suggest(key: str, value: Any = None) -> str:
    """What to write in place of an unknown ``key``: its nearest names, whatever section they are in."""
    while isinstance(value, dict) and value:  # an unknown section: the first key below it says more
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    section, _, name = key.rpartition(".")
    scores = {known: _likeness(section, name, known) for known in (*LEAVES, *SECTIONS)}
    best = max(scores.values())
    near = [known for known in sorted(scores, key=lambda k: -scores[k]) if scores[known] >= max(0.75, best - 0.1)]
    if near:
        return f"did you mean {join_or(near[:3])}?"
    return f"{section} has {names_below(section)}" if section in SECTIONS else f"the sections are {', '.join(SECTIONS)}"


def _likeness(section: str, name: str, known: str) -> float:
    known_section, _, known_name = known.rpartition(".")
    by_name = difflib.SequenceMatcher(None, name, known_name).ratio()
    return by_name + 0.1 * difflib.SequenceMatcher(None, section, known_section).ratio()


def join_or(texts: Sequence[str]) -> str:
    """``a, b or c``."""
    return f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else texts[0]


def names_below(section: str) -> str:
    """The keys of a section, comma-separated."""
    return ", ".join(key.partition(".")[2] for key in LEAVES if key.startswith(f"{section}."))


def show(value: Any, limit: int = 60) -> str:
    """A value as one short line of YAML-like text."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
