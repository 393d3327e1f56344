"""YAML as configuration files mean it: YAML 1.2 scalars, and no key given twice.

PyYAML reads YAML 1.1, where ``1e-6`` is a string and ``off``, ``no``, ``on``, ``yes`` are booleans. A configuration
says ``lr: 1e-6`` and ``verify: off``; so here only ``true`` and ``false`` are booleans, and 1e-6 is a number.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from hpc_rl.errors import UserError

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^[-+]?(?:[0-9]+|0x[0-9a-fA-F]+)$")


_REPLACED = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "timestamp"))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, regexp) for tag, regexp in pairs if tag not in _REPLACED]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} was given on line {seen[key.value]} already", key.start_mark
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep)


def _int(loader: _Loader, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, 16) if "x" in text else int(text)


# The order matters: 12 is an integer before it is a float.
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


class _Dumper(yaml.SafeDumper):
    # The implicit resolvers decide which strings must be quoted, so they must be those of the loader.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> Any:
        # The other quotes fold line breaks and their kin (U+0085) into spaces.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def parse_yaml(text: str, where: str) -> Any:
    """The value that ``text`` holds. Raises UserError naming ``where`` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}{line}: not valid YAML: {problem}: correct that line") from None


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises UserError if it is missing, unreadable, not UTF-8 or not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"config file {path}: no such file (looked in {Path.cwd()}): give the path of a YAML file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path}: byte {error.start} is not UTF-8: save the file as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"config file {path}: cannot be read ({error.strerror}): give the path of a YAML file"
        ) from None
    return parse_yaml(text, str(path))


def dump_yaml(value: Any) -> str:
    """YAML text that ``parse_yaml`` reads back as the same value."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )
    return text
