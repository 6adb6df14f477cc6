"""``shardgen simulate``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardgen.cli_options import planning_options

if TYPE_CHECKING:
    from rich.console import Console

    from loader.simulate import Simulated
    from shardgen.cli_planning import Subject

FRONTIER_BUCKETS = (1, 2, 4, 6, 8, 12, 16)
FRONTIER_LOOKAHEADS = (1, 4, 16, 32, 64)


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


@click.command("simulate")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT|DIR|LENGTHS...")
@planning_options
@click.option(
    "--strategies", callback=_names, help="Some of sorted-static,full-shuffle,bucket-shuffle,loader."
)
@click.option("--frontier", is_flag=True, help="Also buckets x lookahead against efficiency and divergence.")
@click.option("--tokens-column", default="input_ids", show_default=True, help="Column of token ids.")
@click.option("--length-column", help="Column of lengths. [default: seq_len if there is one]")
@click.option("--split", help="Split of a saved DatasetDict.")
@click.option("--shard-size", default="64mb", show_default=True, help="Assumed for bare lengths.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def simulate_command(
    inputs: tuple[str, ...],
    strategies: tuple[str, ...] | None,
    frontier: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan two epochs under each strategy, and compare what they cost and mix.

    \b
    shardgen simulate data/ --world-size 8 --accumulate 4
    shardgen simulate out/ --lookahead 64 --frontier
    shardgen simulate lengths.npy --strategies loader --layout packed --json
    """
    from loader.simulate import STRATEGIES, simulate
    from shardgen.cli_planning import read_subject
    from shardgen.console import progress_bars, stderr_console
    from shardgen.errors import UserError

    chosen = strategies or tuple(STRATEGIES)
    unknown = [name for name in chosen if name not in STRATEGIES]
    if unknown:
        raise UserError(f"strategy {unknown[0]!r} is not one of {', '.join(STRATEGIES)}")
    results: dict[str, Simulated] = {}
    points: list[dict[str, Any]] = []
    with progress_bars() as progress:
        subject = read_subject(inputs, options, progress)
        progress.start("planning", len(chosen))
        for name in chosen:
            results[name] = simulate(subject.corpus, subject.plan_options, subject.epoch_options, name)
            progress.advance(1)
        if frontier:
            progress.start("frontier", len(FRONTIER_BUCKETS) * len(FRONTIER_LOOKAHEADS))
            for point in frontier_points(subject):
                points.append(point)
                progress.advance(1)
    _print(subject, results, points, stderr_console())
    if as_json:
        report: dict[str, Any] = {
            "world_size": subject.planning.world_size,
            "accumulate": subject.planning.accumulate,
            "num_samples": subject.corpus.num_samples,
            "token_budget": subject.plan_options.token_budget,
            "lookahead": subject.plan_options.lookahead,
            "boundaries": list(subject.plan_options.boundaries),
            "strategies": {name: result.to_json() for name, result in results.items()},
        }
        if frontier:
            report["frontier"] = points
        click.echo(json.dumps(report))


def frontier_points(subject: Subject) -> Any:
    """Efficiency and divergence of the loader for every number of buckets and lookahead, as dicts."""
    from dataclasses import replace

    from loader.simulate import simulate
    from shardgen.cli_planning import best_boundaries

    seen = set()
    for num_buckets in FRONTIER_BUCKETS:
        planning = replace(subject.planning, num_buckets=num_buckets, boundaries=None)
        boundaries = best_boundaries(subject.corpus.lengths, planning)
        found = len(boundaries) - 1
        for lookahead in FRONTIER_LOOKAHEADS:
            if (found, lookahead) in seen:  # fewer distinct lengths than buckets
                continue
            seen.add((found, lookahead))
            options = replace(subject.plan_options, boundaries=boundaries, lookahead=lookahead)
            result = simulate(subject.corpus, options, subject.epoch_options, "loader")
            yield {
                "num_buckets": found,
                "lookahead": lookahead,
                "padding_efficiency": result.quality.padding_efficiency,
                "overall": result.quality.overall,
                "step_divergence": result.quality.step_divergence,
                "recurrence": result.recurrence,
            }


def _print(
    subject: Subject, results: dict[str, Simulated], points: list[dict[str, Any]], console: Console
) -> None:
    from rich.table import Table

    options, planning = subject.plan_options, subject.planning
    console.print(
        f"{subject.corpus.num_samples:,} samples, token budget {options.token_budget:,}, "
        f"{planning.world_size} ranks x {planning.accumulate} micro-steps, "
        f"boundaries {', '.join(map(str, options.boundaries[1:]))}, lookahead {options.lookahead}"
    )
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(
        ("strategy", "padding", "balance", "overall", "recurrence", "divergence", "steps", "shapes", "plan s")
    ):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for name, result in results.items():
        quality = result.quality
        table.add_row(
            name,
            f"{quality.padding_efficiency:.4f}",
            f"{quality.rank_balance:.4f}",
            f"{quality.overall:.4f}",
            f"{result.recurrence:.4f}",
            f"{quality.step_divergence:.3f}",
            f"{quality.num_steps:,}",
            f"{quality.num_shapes:,}",
            f"{result.plan_seconds:.2f}",
        )
    console.print(table)
    odd = [
        f"{name}: {result.dropped:,} dropped, {result.repeated:,} repeated, "
        f"{result.quality.fillers:,} fillers"
        for name, result in results.items()
        if result.dropped or result.repeated or result.quality.fillers
    ]
    for line in odd or ["nothing dropped, nothing repeated, no fillers"]:
        console.print(line)
    if points:
        frontier = Table(
            box=None, pad_edge=False, title="loader, by buckets and lookahead", title_justify="left"
        )
        for name in ("buckets", "lookahead", "padding", "overall", "divergence", "recurrence"):
            frontier.add_column(name, justify="right", no_wrap=True)
        for point in points:
            frontier.add_row(
                str(point["num_buckets"]),
                str(point["lookahead"]),
                f"{point['padding_efficiency']:.4f}",
                f"{point['overall']:.4f}",
                f"{point['step_divergence']:.3f}",
                f"{point['recurrence']:.4f}",
            )
        console.print(frontier)
