"""The data sets and verifiers of the package reasoning-gym, as many as the installed packages allow."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from functools import cache
from types import ModuleType

from hpc_rl.errors import UserError

_NAME = "reasoning_gym"
PIP_COMMAND = "pip install --no-deps -r requirements/smollm2.txt"


@cache
def factory() -> ModuleType:
    """The module ``reasoning_gym.factory``, with every family of tasks registered that can be imported.

    The package imports all families at once, and so a dozen packages (a plotting library and a SAT solver in C among
    them) that arithmetic does not need. Where one is missing, the families are imported one by one.

    Raises: UserError if reasoning-gym itself is not installed.
    """
    if importlib.util.find_spec(_NAME) is None:
        raise UserError(f"reasoning-gym is not installed: run `{PIP_COMMAND}`")
    try:
        importlib.import_module(_NAME)
    except ImportError:
        _import_families()
    return importlib.import_module(f"{_NAME}.factory")


def _import_families() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == _NAME]:
        del sys.modules[name]  # what the failed import left
    spec = importlib.util.find_spec(_NAME)
    assert spec is not None, "factory() has looked"
    package = sys.modules[_NAME] = importlib.util.module_from_spec(spec)  # not executed: that is what failed
    for family in pkgutil.iter_modules(package.__path__):
        if family.ispkg:
            try:
                importlib.import_module(f"{_NAME}.{family.name}")
            except ImportError:
                continue
