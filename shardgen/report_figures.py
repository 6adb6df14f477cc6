"""The figures of a report, drawn from the values that :mod:`shardgen.report_data` collects.

Every function takes one figure's values and a width in pixels, wide for a desk and narrow for a phone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from shardgen.report_bars import draw_composition, draw_epoch, draw_shapes, draw_strategies
from shardgen.report_canvas import NARROW, THOUSANDS, WIDE, Json, new_figure, place, style
from shardgen.report_style import ACCENT, MUTED, PAGE, PLAIN, WARM, bucket_color
from shardgen.report_words import share


def draw_lengths(data: Json, width: int) -> Figure:
    """Samples by length, coloured by bucket, boundaries named above."""
    figure = new_figure(width, 280 if width == WIDE else 250)
    ax = place(figure, 52, 46, width - 60, figure.get_figheight() * 72 - 46 - 48)
    edges = np.array(data["edges"], np.float64)
    counts = np.array(data["num_samples"], np.float64)
    where = edges + 1 if data["logarithmic"] else edges
    if data["logarithmic"]:
        ax.set_xscale("log")
        widths = np.log(where[1:] / where[:-1])
        unit, text = np.log(2) / 8, "samples per \N{VULGAR FRACTION ONE EIGHTH} octave"
    else:
        widths = np.diff(where)
        unit = max(1.0, np.median(widths))
        text = f"samples per {unit:.0f} tokens" if unit > 1 else "samples"
    # Bars differ in width where a boundary cuts one short: their areas are the counts.
    heights = counts / widths * unit
    bucket = np.array(data["bucket"])
    for k in np.unique(bucket).tolist():  # one outline each: bars side by side would show seams
        first, stop = np.searchsorted(bucket, [k, k + 1]).tolist()
        ax.stairs(heights[first:stop], where[first : stop + 1], fill=True, color=bucket_color(k), linewidth=0)
    ax.set_xlim(where[0], where[-1])
    ax.set_xlabel("length in tokens" + (", logarithmic" if data["logarithmic"] else ""))
    ax.set_ylabel(text)
    ax.xaxis.set_major_formatter(THOUSANDS)
    ax.yaxis.set_major_locator(MaxNLocator(4 if width == NARROW else 5))
    ax.yaxis.set_major_formatter(FuncFormatter(_compact))
    ax.set_ylim(bottom=0)
    ax.grid(False, axis="x")
    ax.spines["bottom"].set_color(MUTED)
    if not data["logarithmic"]:
        ax.xaxis.set_major_locator(MaxNLocator(5 if width == NARROW else 8))
    above = ax.get_xaxis_transform()
    room, last = 13 / (width - 60), -1.0
    for bound in data["boundaries"][1:-1]:
        at = bound + 1 if data["logarithmic"] else bound
        ax.axvline(at, color=MUTED, linewidth=1, linestyle=(0, (3, 3)), zorder=2)
        share = ax.transAxes.inverted().transform(ax.transData.transform((at, 0.0)))[0]
        if share - last >= room:
            ax.text(at, 1.03, f"{bound:,}", transform=above, rotation=90, ha="center", va="bottom", size=11)
            last = share
    return figure


def _compact(value: float, _: object) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def draw_curve(data: Json, width: int) -> Figure:
    """Efficiency by number of buckets, with the limit and with boundaries chosen by rules."""
    figure = new_figure(width, 320 if width == WIDE else 300)
    ax = place(figure, 52, 46, width - 68, figure.get_figheight() * 72 - 46 - 26)
    buckets = [point["num_buckets"] for point in data["curve"]]
    efficiency = [point["padding_efficiency"] for point in data["curve"]]
    num_buckets, limit = data["num_buckets"], data["lower_bound_efficiency"]
    ahead = data["lookahead_padding_efficiency"]
    rules = [alternative["padding_efficiency"] for alternative in data["alternatives"].values()]
    here = data["padding_efficiency"]
    values = [*efficiency, *rules, here, ahead, limit]
    low, high = min(values), max(values)
    span = max(high - low, 0.02)
    ax.axhline(limit, color=MUTED, linewidth=1, linestyle=(0, (3, 3)))
    ax.text(
        1, limit + 0.015 * span, f"sorted packing: {share(limit)}", va="bottom", ha="right", color=MUTED,
        size=11, transform=ax.get_yaxis_transform(),
    )  # fmt: skip
    ax.plot(buckets, efficiency, color=ACCENT, marker="o", markersize=5, markeredgewidth=0, zorder=3)
    ax.plot([num_buckets] * len(rules), rules, "D", color=PLAIN, markersize=5, markeredgewidth=0, zorder=3)
    ax.plot(
        [num_buckets], [here], "o", color=PAGE, markeredgecolor=ACCENT, markeredgewidth=2.5,
        markersize=10, zorder=4,
    )  # fmt: skip
    ax.plot(
        [num_buckets], [ahead], "o", color=WARM, markersize=9, markeredgewidth=0, zorder=4,
    )  # fmt: skip
    ax.set_ylim(low - 0.06 * span, high + 0.1 * span)
    right = num_buckets > 0.66 * max(*buckets, 2)
    beside = num_buckets + (-0.02 if right else 0.02) * max(*buckets, 2)
    wanted = {
        f"with lookahead {data['lookahead']}: {ahead:.1%}": (ahead - 0.02 * span, WARM),
        f"these {num_buckets}: {here:.1%}": (here - 0.05 * span, ACCENT),
        "chosen by rules": (min(rules) - 0.01 * span, MUTED),
    }
    room = 15 * 1.16 * span / (figure.get_figheight() * 72 - 72)
    labels = [(y, text) for text, (y, _) in wanted.items()]
    for y, text in spread(labels, room, limit - 0.045 * span):
        ha = "right" if right else "left"
        ax.text(beside, y, text, ha=ha, va="center", size=11, color=wanted[text][1])
    ax.set_xlim(min(buckets) - 0.4, max(buckets[-1], num_buckets) + 0.4)
    ax.xaxis.set_major_locator(MaxNLocator(8 if width == NARROW else 16, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if span > 0.05 else 1))
    ax.grid(False, axis="x")
    ax.spines["bottom"].set_color(MUTED)
    ax.set_xlabel("number of buckets")
    ax.set_title("padding efficiency without lookahead", weight="normal", color=MUTED)
    return figure


def draw_frontier(data: Json, width: int) -> Figure:
    """What a longer lookahead saves, and how much more often the same samples meet."""
    points = data["points"]
    counts = sorted({point["num_buckets"] for point in points})
    looks = sorted({point["lookahead"] for point in points})
    columns = 2 if width == WIDE else 1
    panel = (width - 52 * columns - 44 * columns) / columns
    height = 304 if columns == 2 else 614
    figure = new_figure(width, height)
    shown = (
        ("overall", "overall efficiency, by number of buckets", True),
        ("recurrence", "recurrence, by number of buckets", False),
    )
    for number, (key, title, is_share) in enumerate(shown):
        bottom = 46 if columns == 2 or number == 1 else 46 + 310
        left = 52 + (panel + 96 if columns == 2 and number else 0)
        ax = place(figure, left, bottom, panel, 230)
        ends = []
        for order, count in enumerate(counts):
            line = sorted(
                (p["lookahead"], p[key]) for p in points if p["num_buckets"] == count
            )  # by lookahead
            x = [looks.index(lookahead) for lookahead, _ in line]
            y = [value for _, value in line]
            color = bucket_color(_ramp_place(order, len(counts), data["num_buckets"]))
            ax.plot(x, y, color=color, marker="o", markersize=5, markeredgewidth=0)
            ends.append((y[0] if is_share else y[-1], f"{count}"))
        ax.set_xticks(range(len(looks)), [str(lookahead) for lookahead in looks])
        # Lines are furthest apart on the left in the one panel, on the right in the other.
        ax.set_xlim(-0.6 if is_share else -0.15, len(looks) - (0.85 if is_share else 0.4))
        ax.set_xlabel("lookahead in batches")
        ax.set_title(title, weight="normal", color=MUTED)
        ax.grid(False, axis="x")
        ax.spines["bottom"].set_color(MUTED)
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        if is_share:
            ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        else:
            ax.set_ylim(bottom=0)
        beside: float = -0.14 if is_share else len(looks) - 0.86
        low, high = ax.get_ylim()
        for label_y, text in spread(ends, 13 * (high - low) / 230, high):
            ax.text(beside, label_y, text, ha="right" if is_share else "left", va="center_baseline", size=11)
    return figure


def spread(labels: list[tuple[float, str]], room: float, top: float) -> list[tuple[float, str]]:
    """Labels pushed apart until they are ``room`` from each other, none above ``top``; from the lowest."""
    ordered = sorted(labels, key=lambda label: label[0])
    heights = [y for y, _ in ordered]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + room)
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], heights[i + 1] - room if i + 1 < len(heights) else top)
    return [(y, text) for y, (_, text) in zip(heights, ordered, strict=True)]


def _ramp_place(order: int, total: int, num_buckets: int) -> int:
    """The bucket whose colour stands for one of several lines."""
    return round(order / max(total - 1, 1) * (num_buckets - 1))


# name of the figure: (whose values it shows, how it is drawn)
FIGURES: dict[str, tuple[str, Callable[[Json, int], Figure]]] = {
    "lengths": ("lengths", draw_lengths),
    "curve": ("curve", draw_curve),
    "strategies": ("strategies", draw_strategies),
    "frontier": ("frontier", draw_frontier),
    "composition": ("composition", draw_composition),
    "epoch": ("composition", draw_epoch),
    "shapes": ("shapes", draw_shapes),
}


def draw(name: str, data: Json, width: int) -> Figure:
    """Draw one of :data:`FIGURES`.

    Args:
        name: A key of :data:`FIGURES`.
        data: All values of the report, as collected.
        width: :data:`WIDE` or :data:`NARROW`.
    """
    source, function = FIGURES[name]
    with style():
        return function(data[source], width)
