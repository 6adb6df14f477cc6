"""The figures of a report that are bars: strategies, steps and shapes.

Arguments as in :mod:`shardgen.report_figures`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from shardgen.report_canvas import THOUSANDS, WIDE, Json, new_figure, place
from shardgen.report_style import ACCENT, INK, LINE, MUTED, PLAIN, bucket_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = (
    ("padding_efficiency", "padding efficiency", "more is better", "{:.1%}"),
    ("rank_balance", "rank balance", "more is better", "{:.1%}"),
    ("overall", "overall", "more is better", "{:.1%}"),
    ("recurrence", "recurrence", "less is better", "{:.4f}"),
    ("step_divergence", "step divergence", "less is better", "{:.3f}"),
)


def draw_strategies(data: Json, width: int) -> Figure:
    """One panel of bars per measure, strategies one below the other."""
    names = list(data)
    columns = 5 if width == WIDE else 1
    names_width, gap, head, bar = 108, 26 if columns > 1 else 20, 44 if columns > 1 else 26, 26
    panel = (width - names_width - gap * (columns - 1) - 4) / columns
    rows = -(-len(MEASURES) // columns)
    height = rows * (head + bar * len(names)) + gap * (rows - 1) + 4
    figure = new_figure(width, height)
    for number, (key, title, better, form) in enumerate(MEASURES):
        row, column = divmod(number, columns)
        top = height - row * (head + bar * len(names) + gap) - head
        left = names_width + column * (panel + gap)
        ax = place(figure, left, top - bar * len(names), panel, bar * len(names))
        values = [data[name][key] for name in names]
        most = max(*values, 1e-9)
        at = np.arange(len(names))
        colors = [ACCENT if name == "loader" else PLAIN for name in names]
        room = 62 / panel  # for the number behind the bar
        ax.set_xlim(0, most / (1 - room))
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.barh(at, [most] * len(names), 0.5, color=LINE, linewidth=0)
        ax.barh(at, values, 0.5, color=colors, linewidth=0)
        for y, (name, value) in enumerate(zip(names, values, strict=True)):
            strong: Json = {"weight": "bold", "color": ACCENT} if name == "loader" else {"color": INK}
            ax.text(
                1, y, form.format(value), transform=ax.get_yaxis_transform(), va="center_baseline",
                ha="right", size=12, **strong,
            )  # fmt: skip
            if column == 0:
                ax.text(
                    -8 / panel, y, name, transform=ax.get_yaxis_transform(), va="center_baseline",
                    ha="right", size=12, **strong,
                )  # fmt: skip
        ax.set_axis_off()
        start: float = 0.0 if columns > 1 else -names_width / panel
        ax.text(
            start, 1 + (26 if columns > 1 else 8) / (bar * len(names)), title, transform=ax.transAxes,
            weight="bold", size=12,
        )  # fmt: skip
        if columns > 1:
            ax.text(0, 1 + 9 / (bar * len(names)), better, transform=ax.transAxes, color=MUTED, size=11)
        else:
            title_y = 1 + 8 / (bar * len(names))
            ax.text(1, title_y, better, transform=ax.transAxes, color=MUTED, size=11, ha="right")
    return figure


def draw_composition(data: Json, width: int) -> Figure:
    """Which buckets the tokens of single steps come from, under every strategy."""
    columns = 2 if width == WIDE else 1
    names = list(data["steps"])
    rows = -(-len(names) // columns)
    gap, head, tall = 36, 24, 120 if columns == 2 else 96
    panel = (width - 44 - gap * (columns - 1) - 16) / columns
    height = rows * (tall + head) + (rows - 1) * 30 + 42
    figure = new_figure(width, height)
    for number, name in enumerate(names):
        row, column = divmod(number, columns)
        bottom = height - (row + 1) * (tall + head) - row * 30
        ax = place(figure, 44 + column * (panel + gap), bottom, panel, tall)
        steps = data["steps"][name]
        _stack(ax, steps["shares"], steps["first_step"])
        strong = ACCENT if name == "loader" else INK
        ax.set_title(name, color=strong)
        if row == rows - 1:
            ax.set_xlabel("step")
        if column:
            ax.tick_params(labelleft=False)
    return figure


def draw_epoch(data: Json, width: int) -> Figure:
    """The same over the whole epoch of the loader, steps averaged in groups."""
    epoch = data["epoch"]
    figure = new_figure(width, 190)
    ax = place(figure, 44, 44, width - 60, 136)
    edges = [*epoch["first_step"], epoch["num_steps"]]
    upper = np.cumsum(np.array(epoch["shares"], np.float64), axis=1)  # (groups, buckets)
    below = np.zeros(len(upper))
    for bucket in range(upper.shape[1]):
        color = bucket_color(bucket)
        ax.stairs(upper[:, bucket], edges, baseline=below, fill=True, color=color, linewidth=0)
        below = upper[:, bucket]
    _shares_axes(ax)
    ax.set_xlim(0, epoch["num_steps"])
    ax.set_xlabel("step of the epoch")
    return figure


def _stack(ax: Axes, shares: list[list[float]], first_step: int) -> None:
    # (steps, buckets) -> one set of bars per bucket, each on top of the shorter buckets
    table = np.array(shares, np.float64)
    at = first_step + np.arange(len(table))
    below = np.zeros(len(table))
    for bucket in range(table.shape[1]):
        taken = table[:, bucket] > 0
        ax.bar(
            at[taken],
            table[taken, bucket],
            0.86,
            bottom=below[taken],
            color=bucket_color(bucket),
            linewidth=0,
        )
        below += table[:, bucket]
    _shares_axes(ax)
    ax.set_xlim(first_step - 0.6, first_step + len(table) - 0.4)


def _shares_axes(ax: Axes) -> None:
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.5, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.xaxis.set_major_formatter(THOUSANDS)
    ax.grid(False)
    ax.spines["bottom"].set_color(MUTED)


def draw_shapes(data: Json, width: int) -> Figure:
    """Distinct tensor shapes against efficiency, for ways to have fewer."""
    choices = data["choices"]
    row, head, names_width = 30, 30, 118
    figure = new_figure(width, head + row * len(choices) + 4)
    gap = 28 if width == WIDE else 16
    panel = (width - names_width - gap - 4) / 2
    panels = (
        ("num_shapes", "distinct shapes", "{:,.0f}"),
        ("padding_efficiency", "padding efficiency", "{:.1%}"),
    )
    for number, (key, title, form) in enumerate(panels):
        ax = place(figure, names_width + number * (panel + gap), 4, panel, row * len(choices))
        values = [choice[key] for choice in choices]
        # Numbers of shapes span decades.
        drawn = [np.log10(value) + 0.15 for value in values] if key == "num_shapes" else values
        most = max(*drawn, 1e-9)
        ax.set_xlim(0, most / (1 - 58 / panel))
        ax.set_ylim(len(choices) - 0.5, -0.5)
        at = np.arange(len(choices))
        ax.barh(at, [most] * len(choices), 0.46, color=LINE, linewidth=0)
        ax.barh(at, drawn, 0.46, color=[PLAIN if y else ACCENT for y in range(len(choices))], linewidth=0)
        for y, (choice, value) in enumerate(zip(choices, values, strict=True)):
            strong: Json = {"color": INK} if y else {"weight": "bold", "color": ACCENT}
            ax.text(
                1, y, form.format(value), transform=ax.get_yaxis_transform(), va="center_baseline",
                ha="right", size=12, **strong,
            )  # fmt: skip
            if not number:
                ax.text(
                    -8 / panel, y, choice["name"], transform=ax.get_yaxis_transform(),
                    va="center_baseline", ha="right", size=12, **strong,
                )  # fmt: skip
        ax.set_axis_off()
        ax.text(0, 1 + 8 / (row * len(choices)), title, transform=ax.transAxes, weight="bold", size=12)
    return figure
