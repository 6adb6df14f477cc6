"""``shardgen verify``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from shardgen.errors import UserError


@click.command("verify")
@click.argument("directory")
@click.option(
    "--source", "sources", multiple=True, metavar="INPUT", help="Input of the build; may be repeated."
)
@click.argument("more_sources", nargs=-1, metavar="[INPUT...]")
@click.option("--split", help="Split of a saved DatasetDict.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def verify_command(
    directory: str, sources: tuple[str, ...], more_sources: tuple[str, ...], split: str | None, as_json: bool
) -> None:
    """Check hashes, sizes, counts and order; with --source, that every source row is there exactly once.

    \b
    shardgen verify shards
    shardgen verify shards --source data/ --json
    """

    from shardgen.console import progress_bars, stderr_console
    from shardgen.manifest import Manifest
    from shardgen.verify import verify

    if more_sources and not sources:
        raise click.UsageError("more than one directory: name the inputs of the build with --source")
    with progress_bars() as progress:
        # Shards are gone through once, and once more beside the source.
        total = Manifest.load(directory).num_samples if os.path.isdir(directory) else 0
        progress.start("verifying", total * (2 if sources else 1))
        result = verify(directory, (*sources, *more_sources), progress.advance, split)
    manifest = result.manifest
    console = stderr_console()
    for problem in result.problems:
        console.print(f"bad: {problem}", markup=False, soft_wrap=True)
    if as_json:
        report = {
            "directory": directory,
            "ok": not result.problems,
            "num_samples": manifest.num_samples,
            "num_shards": len(result.shards),
            "fingerprint": manifest.fingerprint,
            "compared_with_source": bool(sources),
            "problems": [asdict(problem) for problem in result.problems],
        }
        click.echo(json.dumps(report))
    if result.problems:
        raise UserError(
            f"{directory} is not as it was built: {len(result.problems)} problems, "
            f"first: {result.problems[0]}"
        )
    against = " and equal to the source" if sources else ""
    console.print(
        f"{directory}: {manifest.num_samples:,} samples in {len(result.shards):,} shards are whole{against}"
    )
