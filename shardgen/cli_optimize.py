"""``shardgen optimize``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardgen.cli_options import planning_options

if TYPE_CHECKING:
    from rich.console import Console

    from shardgen.lengths import Histogram
    from shardgen.optimize import OptimizeResult
    from shardgen.progress import Progress


@click.command("optimize")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT|DIR|LENGTHS...")
@planning_options
@click.option("--tokens-column", default="input_ids", show_default=True, help="Column of token ids.")
@click.option("--length-column", help="Column of lengths. [default: seq_len if there is one]")
@click.option("--split", help="Split of a saved DatasetDict.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Padded tokens that all ranks process per second: predicts real tokens/s and time per epoch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def optimize_command(
    inputs: tuple[str, ...], tokens_per_second: float | None, as_json: bool, **options: Any
) -> None:
    """Find the bucket boundaries with the least padding, and show what they are worth.

    Reads lengths only, never tokens where there is a column of lengths. A .npz file may hold a histogram: the
    keys lengths and counts.

    \b
    shardgen optimize data/ --buckets 6 --token-budget 49152
    shardgen optimize lengths.npy --buckets auto --json
    shardgen optimize out/ --boundaries 512,1024,2048,4096
    """
    from shardgen.cli_options import Planning
    from shardgen.console import progress_bars, stderr_console
    from shardgen.optimize import optimize

    planning = Planning.of(options, _recorded(inputs))
    with progress_bars() as progress:
        histogram = _read_histogram(inputs, options, progress)
        progress.start("finding boundaries", 0)
        result = optimize(
            histogram,
            num_buckets=planning.num_buckets,
            budget=planning.budget,
            lookahead=planning.lookahead,
            optimize_for_lookahead=planning.optimize_for_lookahead,
            boundaries=planning.boundaries,
        )
    report = result.to_json()
    if tokens_per_second is not None:
        report["tokens_per_second"] = tokens_per_second * result.lookahead_padding_efficiency
        report["epoch_seconds"] = result.num_tokens / report["tokens_per_second"]
    _print(result, planning.lookahead, report, stderr_console())
    if as_json:
        click.echo(json.dumps(report))


def _recorded(inputs: tuple[str, ...]) -> dict[str, Any] | None:
    """Options of a build when that is the input; its boundaries are searched anew."""
    import os

    from shardgen.manifest import MANIFEST, Manifest

    if len(inputs) != 1 or not os.path.isfile(os.path.join(inputs[0], MANIFEST)):
        return None
    return Manifest.load(inputs[0]).options


def _read_histogram(inputs: tuple[str, ...], options: dict[str, Any], progress: Progress) -> Histogram:
    from pathlib import Path

    from shardgen.lengths import Histogram, read_histogram_file

    if len(inputs) == 1 and Path(inputs[0]).suffix in (".npy", ".npz"):
        return read_histogram_file(inputs[0])  # with counts, it stands for more samples than fit in memory
    from shardgen.sources import read_lengths

    names = ("tokens_column", "length_column", "split")
    chosen = {name: options[name] for name in names}
    return Histogram.from_lengths(read_lengths(inputs, **chosen, progress=progress).lengths)


def _print(result: OptimizeResult, lookahead: int, report: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    from shardgen.console import percent

    console.print(
        f"{result.num_samples:,} samples, {result.num_tokens:,} tokens, token budget {result.token_budget:,}"
    )
    buckets = Table(box=None, pad_edge=False)
    for name in ("bucket", "lengths", "samples", "tokens", "mean", "batch", "efficiency"):
        buckets.add_column(name, justify="right", no_wrap=True)
    for number, bucket in enumerate(result.buckets):
        buckets.add_row(
            str(number),
            f"{bucket.lower + 1}-{bucket.upper}",
            f"{bucket.num_samples:,}",
            f"{bucket.num_tokens:,}",
            f"{bucket.mean_length:.1f}",
            f"{bucket.batch_size:,}",
            percent(bucket.padding_efficiency if bucket.num_samples else None),
        )
    console.print(buckets)
    choices = Table(box=None, pad_edge=False)
    choices.add_column("", no_wrap=True)
    choices.add_column("efficiency", justify="right", no_wrap=True)
    choices.add_column("boundaries")
    rows = {"these": (result.padding_efficiency, result.boundaries)}
    for name, alternative in result.alternatives.items():
        rows[name.replace("_", "-")] = (alternative.padding_efficiency, alternative.boundaries)
    for name, (efficiency, boundaries) in rows.items():
        choices.add_row(name, percent(efficiency), ", ".join(map(str, boundaries[1:])))
    choices.add_row(
        "sorted packing", percent(result.lower_bound_efficiency), "the limit, without any shuffle"
    )
    choices.add_row(
        f"lookahead {lookahead}", percent(result.lookahead_padding_efficiency), "these, sorted in windows"
    )
    console.print(choices)
    curve = ", ".join(f"{k}: {percent(e)}" for k, e in result.curve)
    console.print(f"best by number of buckets: {curve}")
    if "epoch_seconds" in report:
        console.print(
            f"predicted with lookahead {lookahead}: {report['tokens_per_second']:,.0f} real tokens/s, "
            f"{_duration(report['epoch_seconds'])} per epoch"
        )
    if result.grid_step > 1:
        console.print(
            f"note: boundaries were searched in steps of up to {result.grid_step} tokens, then moved freely"
        )
    for note in result.notes:
        console.print(f"note: {note}")


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
