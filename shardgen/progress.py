"""What a build tells of its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


def _ignore(*args: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Callbacks; by default nothing is shown.

    Attributes:
        start: A stage begins: its name and its number of rows, 0 if unknown.
        advance: Rows done since the last call.
        note: A line for people.
    """

    start: Callable[[str, int], None] = field(default=_ignore)
    advance: Callable[[int], None] = field(default=_ignore)
    note: Callable[[str], None] = field(default=_ignore)
