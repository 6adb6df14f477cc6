"""``shardgen explain``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from shardgen.cli_options import planning_options

if TYPE_CHECKING:
    from rich.console import Console

    from loader.explained import Explainer


@click.command("explain")
@click.argument("directory", metavar="DIR")
@planning_options
@click.option("--epoch", type=click.IntRange(min=0), help="Epoch, from 0. [default: the state's, else 0]")
@click.option("--step", type=click.IntRange(min=0), help="Optimizer step of the epoch.")
@click.option("--micro-step", type=click.IntRange(min=0), help="Batch of the step. [default: all of them]")
@click.option("--rank", type=click.IntRange(min=0), help="Data-parallel rank.")
@click.option("--sample", type=click.IntRange(min=0), help="Sample id: where and when is it delivered?")
@click.option(
    "--state",
    type=click.Path(exists=True, dir_okay=False),
    help="A saved loader state (JSON): its seed, options and position hold; alone, say what it holds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def explain_command(
    directory: str,
    epoch: int | None,
    step: int | None,
    micro_step: int | None,
    rank: int | None,
    sample: int | None,
    state: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Tell which samples a batch holds and where they came from, or where a sample goes.

    Plans what the loader plans under the same options; reads no shard.

    \b
    shardgen explain out/ --epoch 2 --step 170 --rank 3 --world-size 8 --seed 17
    shardgen explain out/ --sample 4711 --epoch 2 --world-size 8 --seed 17
    shardgen explain out/ --state loader.json
    shardgen explain out/ --state loader.json --step 170 --rank 0
    """
    from loader.explained import Explainer
    from shardgen.console import progress_bars, stderr_console

    if (step is None) != (rank is None):
        raise click.UsageError("a batch is named by --step and --rank: give both")
    if step is not None and sample is not None:
        raise click.UsageError("--step asks for a batch and --sample for a sample: use one of them")
    if step is None and sample is None and state is None:
        raise click.UsageError("say what to explain: --step and --rank, --sample, or --state")
    if micro_step is not None and step is None:
        raise click.UsageError("--micro-step needs --step")
    with progress_bars() as progress:
        progress.start("planning", 0)
        explainer = Explainer.open(directory, options, state)
        if step is not None and rank is not None:
            report = explainer.batches(epoch, step, micro_step, rank)
        elif sample is not None:
            report = explainer.sample(epoch, sample)
        else:
            report = explainer.position()
    _print(report, explainer, stderr_console())
    if as_json:
        click.echo(json.dumps(report))


def _print(report: dict[str, Any], explainer: Explainer, console: Console) -> None:
    from rich.table import Table

    head = {name: value for name, value in report.items() if not isinstance(value, list | dict)}
    console.print(", ".join(f"{name} {value}" for name, value in head.items()), highlight=False)
    batches = report.get("batches", [report] if "samples" in report else [])
    for batch in batches:
        console.print(
            ", ".join(f"{name} {value}" for name, value in batch.items() if not isinstance(value, list)),
            highlight=False,
        )
        _print_table(Table(box=None, pad_edge=False), batch["samples"], console)
    for name in ("deliveries", "segments"):
        if report.get(name):
            _print_table(Table(box=None, pad_edge=False), report[name], console)
        elif name in report:
            console.print(f"no {name}")


def _print_table(table: Any, rows: list[dict[str, Any]], console: Console) -> None:
    if not rows:
        return
    names = [name for name in rows[0] if not isinstance(rows[0][name], dict)]
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in names))
    console.print(table)
