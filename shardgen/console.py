"""Tables and progress bars for people, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from shardgen.progress import Progress

if TYPE_CHECKING:
    from shardgen.build import BuildResult

PLAIN_WIDTH = 110


def stderr_console() -> Console:
    """A console on stderr; of a fixed width without a terminal. Brackets in names stay as they are."""
    width = None if sys.stderr.isatty() else PLAIN_WIDTH
    return Console(stderr=True, width=width, highlight=False, markup=False)


class _Count(ProgressColumn):
    """``1,200/5,000``, or ``1,200`` where the total is unknown."""

    def render(self, task: Task) -> Text:
        done = f"{task.completed:,.0f}"
        return Text(f"{done}/{task.total:,.0f}" if task.total else done if task.completed else "")


class _Rate(ProgressColumn):
    """``3,450/s`` once it is known."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s")


class _Time(TimeRemainingColumn):
    """The time left, or where nobody can know it the time passed."""

    def render(self, task: Task) -> Text:
        if task.total:
            left = super().render(task)
            return Text.assemble(left, " left", style="progress.remaining")
        return Text(f"{task.elapsed or 0:.0f} s")


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on stderr when it is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield Progress(note=lambda text: print(text, file=sys.stderr, flush=True))
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        _Count(),
        _Rate(),
        _Time(),
    )
    with Bars(*columns, console=stderr_console(), transient=True) as bars:

        def start(name: str, total: int) -> None:
            for old in bars.task_ids:
                bars.remove_task(old)
            bars.add_task(name, total=total or None)

        def advance(amount: int) -> None:
            if bars.task_ids:
                bars.advance(bars.task_ids[-1], amount)

        yield Progress(start=start, advance=advance, note=bars.console.print)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def print_build(result: BuildResult, console: Console) -> None:
    """The closing table of a build."""
    manifest = result.manifest
    table = Table(box=None, pad_edge=False)
    for name in ("bucket", "lengths", "samples", "tokens", "mean", "batch", "shards", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, bucket in enumerate(manifest.buckets):
        table.add_row(
            str(number),
            f"{bucket.lower + 1}-{bucket.upper}",
            f"{bucket.num_samples:,}",
            f"{bucket.num_tokens:,}",
            f"{bucket.mean_length:.1f}",
            f"{bucket.batch_size:,}",
            f"{bucket.num_shards:,}",
            percent(bucket.padding_efficiency if bucket.num_samples else None),
        )
    mean = manifest.num_tokens / manifest.num_samples
    shards = sum(bucket.num_shards for bucket in manifest.buckets)
    efficiency = percent(manifest.predicted["padding_efficiency"])
    table.add_row(
        "all",
        "",
        f"{manifest.num_samples:,}",
        f"{manifest.num_tokens:,}",
        f"{mean:.1f}",
        "",
        f"{shards:,}",
        efficiency,
    )
    console.print(table)
    lookahead = manifest.options["lookahead"]
    parts = [
        f"with lookahead {lookahead} {percent(manifest.predicted['lookahead_padding_efficiency'])}",
        f"hand-picked boundaries {percent(result.hand_picked_efficiency)}",
        f"full shuffle {percent(result.full_shuffle_efficiency)}",
    ]
    console.print("padding efficiency: " + ", ".join(parts))
    odd = {name.replace("_", " "): count for name, count in manifest.counts.items() if count}
    if odd:
        console.print("rows: " + ", ".join(f"{count:,} {name}" for name, count in odd.items()))
    for note in result.plan.notes:
        console.print(f"note: {note}")
    rate = manifest.num_samples / max(result.seconds, 1e-9)
    console.print(f"{result.out}: {manifest.num_samples:,} samples in {result.seconds:.1f} s ({rate:,.0f}/s)")
