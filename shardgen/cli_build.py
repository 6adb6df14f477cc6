"""``shardgen build``."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from shardgen.cli_options import Planning, planning_options

if TYPE_CHECKING:
    from shardgen.options import BuildOptions


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic in stubs only
    """Bytes, with an optional ``kb``, ``mb`` or ``gb`` (powers of 1024)."""

    name = "size"
    UNITS = (("kb", 1 << 10), ("mb", 1 << 20), ("gb", 1 << 30), ("b", 1), ("", 1))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower()
        suffix, unit = next((s, u) for s, u in self.UNITS if text.endswith(s))
        try:
            size = int(float(text.removesuffix(suffix)) * unit)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size: write it like 64mb or 67108864", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is below one byte", param, ctx)
        return size


def names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """A comma-separated list of names."""
    return tuple(name.strip() for name in (value or "").split(",") if name.strip())


def hash_names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Like :func:`names`; ``none`` for none."""
    return () if value.strip().lower() == "none" else names(ctx, param, value)


def build_options(options: dict[str, Any]) -> BuildOptions:
    """The options of a build from those of the command line."""
    from shardgen.options import BuildOptions

    planning = Planning.of(options)
    budget = planning.budget
    known = {f.name for f in fields(BuildOptions)}
    return BuildOptions(
        **{name: value for name, value in options.items() if name in known - {"boundaries", "cost_model"}},
        num_buckets=planning.num_buckets,
        boundaries=planning.boundaries,
        cost_model=budget.cost_model,
    )


@click.command("build", context_settings={"show_default": True})
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", required=True, help="Directory to make; it appears when it is complete.")
@planning_options
@click.option("--columns", callback=names, help="Columns to store besides tokens and mask, comma-separated.")
@click.option("--tokens-column", default="input_ids", help="Column with a list of token ids per row.")
@click.option(
    "--length-column",
    show_default="seq_len if there is one",
    help='Column with the number of tokens, so that they need not be read; "" for none.',
)
@click.option("--loss-mask-column", help="Column with a list that is 0 where a token has no loss.")
@click.option("--split", help="Split of a saved DatasetDict.")
@click.option("--max-length", type=click.IntRange(1), help="Longest sample, in tokens.")
@click.option(
    "--over-length",
    type=click.Choice(["error", "drop", "truncate", "split"]),
    default="error",
    help="Rows longer than that, or than the token budget.",
)
@click.option(
    "--on-empty", type=click.Choice(["error", "skip"]), default="error", help="Rows without tokens."
)
@click.option("--on-null", type=click.Choice(["error", "skip"]), default="error", help="Rows with a null.")
@click.option("--token-dtype", default="auto", help="auto, uint16, int32 or another integer type.")
@click.option("--shard-size", type=ByteSize(), default="64mb", help="Most bytes of a shard, uncompressed.")
@click.option("--compression", help="Such as zstd:3; none by default.")
@click.option("--hashes", callback=hash_names, default="xxh64", help="Comma-separated, or none.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    help="Processes that read and write, at most; a small input needs fewer.",
)
@click.option("--memory", type=ByteSize(), default="512mb", help="Buffers of each process.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", help="Who runs the workers.")
@click.option("--ray-address", help="Ray cluster to use; a local one is started by default.")
@click.option("--resume", is_flag=True, help="Go on with a build that was killed.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier build once the new one is complete.")
@click.option(
    "--tokens-per-second", type=click.FloatRange(min=0, min_open=True), help="To estimate an epoch."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line of stdout.")
def build_command(
    inputs: tuple[str, ...], out: str, tokens_per_second: float | None, as_json: bool, **options: Any
) -> None:
    """Write length-bucketed shards from Parquet, Arrow or JSON-lines files.

    \b
    shardgen build data/ --out shards
    shardgen build 'data/*.parquet' --out shards --buckets auto --token-budget 16384 --workers 8
    shardgen build corpus.jsonl --out s3://bucket/shards --max-length 8192 --over-length truncate
    shardgen build data/ --out shards --resume
    """
    from shardgen.build import build
    from shardgen.console import print_build, progress_bars, stderr_console

    with progress_bars() as progress:
        result = build(inputs, out, build_options(options), progress)
    report = result.to_json()
    console = stderr_console()
    print_build(result, console)
    if tokens_per_second is not None:
        padded = result.manifest.num_tokens / (result.plan.lookahead_padding_efficiency or 1.0)
        report["epoch_seconds"] = padded / tokens_per_second
        console.print(
            f"an epoch at {tokens_per_second:,.0f} padded tokens/s: {report['epoch_seconds'] / 3600:.2f} h"
        )
    if as_json:
        click.echo(json.dumps(report))
