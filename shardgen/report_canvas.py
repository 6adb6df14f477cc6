"""What the figures of a report are drawn on: sizes and axes in pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from shardgen.report_style import RC

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = dict[str, Any]
WIDE, NARROW = 860, 400
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


@contextmanager
def style() -> Iterator[None]:
    """Draw with the settings of a report."""
    with matplotlib.rc_context():
        matplotlib.rcParams.update(RC)
        yield


def new_figure(width: int, height: float) -> Figure:
    """An empty figure of a size in pixels."""
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def place(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at pixels from the lower left."""
    full_width, full_height = (72 * inches for inches in figure.get_size_inches())
    box = (left / full_width, bottom / full_height, width / full_width, height / full_height)
    return figure.add_axes(box)
