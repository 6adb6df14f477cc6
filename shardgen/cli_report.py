"""``shardgen report``."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from shardgen.cli_options import planning_options


@click.command("report")
@click.argument("inputs", nargs=-1, required=True, metavar="DIR|LENGTHS...")
@click.option("--out", required=True, metavar="FILE", help="The page to write; an older one is replaced.")
@planning_options
@click.option(
    "--frontier/--no-frontier",
    default=True,
    show_default=True,
    help="Also plan every number of buckets with every lookahead: most of the time it takes.",
)
@click.option("--tokens-column", default="input_ids", show_default=True, help="Column of token ids.")
@click.option("--length-column", help="Column of lengths. [default: seq_len if there is one]")
@click.option("--split", help="Split of a saved DatasetDict.")
@click.option("--shard-size", default="64mb", show_default=True, help="Assumed for bare lengths.")
def report_command(inputs: tuple[str, ...], out: str, frontier: bool, **options: Any) -> None:
    """Write one self-contained page: lengths, buckets, strategies and what they cost, with figures.

    The page needs no network and follows the reader's light or dark theme.

    \b
    shardgen report out/ --out report.html
    shardgen report lengths.npy --out report.html --world-size 8 --accumulate 4
    shardgen report data/ --out report.html --buckets auto --token-budget 16384
    """
    from pathlib import Path

    from shardgen.cli_planning import read_subject
    from shardgen.console import progress_bars, stderr_console
    from shardgen.report import check_out, render, write_report
    from shardgen.report_data import collect

    check_out(Path(out))
    with progress_bars() as progress:
        subject = read_subject(inputs, options, progress)
        data = collect(subject, frontier=frontier, progress=progress)
        progress.start("drawing", 0)
        html = render(data, _title(inputs), _command_line(click.get_current_context(), inputs))
    write_report(out, html)
    stderr_console().print(f"{out}: {len(html.encode()) / 1e6:.1f} MB", markup=False, soft_wrap=True)


def _title(inputs: tuple[str, ...]) -> str:
    names = [os.path.basename(os.path.abspath(name)) for name in inputs]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _command_line(ctx: click.Context, inputs: tuple[str, ...]) -> str:
    """The call with what was said on the command line, inputs by their last name alone."""
    words = ["shardgen", "report", *(os.path.basename(os.path.abspath(name)) for name in inputs)]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not isinstance(parameter, click.Option) or not given or name == "out":
            continue
        value = ctx.params[name]
        if parameter.is_flag:
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [parameter.opts[0], os.path.basename(text) if name == "cost_model" else text]
    return shlex.join([*words, "--out", "report.html"])
