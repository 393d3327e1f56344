"""What every refusal must be: a UserError of one line that holds the value, the rule and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpc_rl.errors import UserError


@contextmanager
def refused(value: str, rule: str, fix: str) -> Iterator[None]:
    """The block must raise a UserError whose one line contains all three texts, in this order."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, f"more than one line: {message}"
    place = 0
    for part in (value, rule, fix):
        found = message.find(part, place)
        assert found >= 0, f"{part!r} is not in {message!r} (after character {place})"
        place = found + len(part)
