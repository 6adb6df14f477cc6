"""The planning options that several commands share, and what they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import click

from shardgen.buckets import Padding, TokenBudget
from shardgen.cost import CostModel

_C = TypeVar("_C", bound=Callable[..., Any])


class BucketCount(click.ParamType):  # type: ignore[type-arg]  # generic in stubs only
    """A number of buckets, or ``auto``."""

    name = "number|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor auto", param, ctx)
        if number < 1:
            self.fail(f"{number} is below 1", param, ctx)
        return number


class Lengths(click.ParamType):  # type: ignore[type-arg]
    """Ascending lengths, comma-separated."""

    name = "lengths"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            lengths = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of lengths: write it like 770,1216,1728", param, ctx)
        if any(a >= b for a, b in pairwise(lengths)) or lengths[0] < 0:
            self.fail(f"{value!r} does not ascend", param, ctx)
        return lengths


_POSITIVE = click.IntRange(min=1)
_OPTIONS = (
    click.option("--buckets", type=BucketCount(), default="6", show_default=True, help="Number of buckets."),
    click.option("--boundaries", type=Lengths(), help="Upper bounds instead, ascending: 770,1216,..."),
    click.option(
        "--token-budget", type=_POSITIVE, default=49152, show_default=True, help="Padded tokens of a batch."
    ),
    click.option("--cost-budget", type=_POSITIVE, help="Token-equivalents of a batch, a second limit."),
    click.option("--max-batch-size", type=_POSITIVE, help="Rows of a batch."),
    click.option(
        "--padding",
        type=click.Choice(get_args(Padding)),
        default="longest",
        show_default=True,
        help="Pad to the longest row, or to the bucket's boundary (static shapes).",
    ),
    click.option("--pad-to-multiple-of", type=_POSITIVE, default=1, show_default=True, help="In tokens."),
    click.option(
        "--lookahead", type=_POSITIVE, default=32, show_default=True, help="Batches sorted at a time."
    ),
    click.option(
        "--optimize-for-lookahead",
        type=_POSITIVE,
        default=1,
        show_default=True,
        help="Lookahead that the boundaries are optimised for.",
    ),
    click.option(
        "--quadratic-length", type=_POSITIVE, help="Length at which attention costs as much as the rest."
    ),
    click.option("--overhead-tokens", type=click.IntRange(min=0), help="Fixed cost of a batch, in tokens."),
    click.option("--cost-model", type=click.Path(), help="JSON file with both, as calibration writes it."),
    click.option("--world-size", type=_POSITIVE, default=8, show_default=True, help="Ranks."),
    click.option("--accumulate", type=_POSITIVE, default=1, show_default=True, help="Micro-steps of a step."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all orders."),
    click.option(
        "--layout",
        type=click.Choice(["padded", "packed"]),
        default="padded",
        show_default=True,
        help="Rectangles, or batches without padding for attention over variable lengths.",
    ),
    click.option(
        "--block-samples", type=_POSITIVE, default=262144, show_default=True, help="Planned at once."
    ),
    click.option(
        "--num-canonical-nodes", type=_POSITIVE, default=1, show_default=True, help="Lanes of storage."
    ),
)


def planning_options(command: _C) -> _C:
    """Add the planning options to a command; :meth:`Planning.of` reads them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What the planning options ask for.

    Attributes:
        num_buckets: Buckets to find when ``boundaries`` is ``None``.
        boundaries: Upper bounds, or ``None`` to find the best.
        budget: The limits of one batch.
        lookahead: Batches per window.
        optimize_for_lookahead: Lookahead of the objective.
        world_size: Ranks.
        accumulate: Micro-steps of a step.
        seed: Of all orders.
        layout: ``"padded"`` or ``"packed"``.
        block_samples: Entries planned at once.
        num_canonical_nodes: Lanes.
    """

    num_buckets: int | Literal["auto"]
    boundaries: tuple[int, ...] | None
    budget: TokenBudget
    lookahead: int
    optimize_for_lookahead: int
    world_size: int
    accumulate: int
    seed: int
    layout: Literal["padded", "packed"]
    block_samples: int
    num_canonical_nodes: int

    @classmethod
    def of(cls, options: Mapping[str, Any], built: Mapping[str, Any] | None = None) -> Planning:
        """Read the options of the command that is running.

        Args:
            options: Its parameters by name; others than planning options are passed over.
            built: Options recorded by a build: they stand in for what the command line leaves open. Its
                boundaries come as ``boundaries``.

        Raises:
            UserError: A limit that cannot be, or a cost model that cannot be read.
        """
        values = dict(options)
        context = click.get_current_context(silent=True)
        if built and context:
            given = {
                name
                for name in values
                if context.get_parameter_source(name) not in (None, click.core.ParameterSource.DEFAULT)
            }
            open_names = set(built) - given
            if given & {"buckets", "boundaries", "optimize_for_lookahead"}:
                open_names -= {"buckets", "boundaries"}
            if "cost_model" in given:
                open_names -= {"quadratic_length", "overhead_tokens"}
            values |= {name: built[name] for name in open_names if name in values}
        if values["cost_model"] is not None:
            if values["quadratic_length"] is not None or values["overhead_tokens"] is not None:
                raise click.UsageError(
                    "--cost-model has both --quadratic-length and --overhead-tokens: use one"
                )
            model = CostModel.load(values["cost_model"])
        else:
            model = CostModel(
                quadratic_length=values["quadratic_length"], overhead_tokens=values["overhead_tokens"] or 0
            )
        return cls(
            num_buckets=values["buckets"],
            boundaries=None if values["boundaries"] is None else tuple(values["boundaries"]),
            budget=TokenBudget(
                tokens=values["token_budget"],
                max_batch_size=values["max_batch_size"],
                pad_to_multiple_of=values["pad_to_multiple_of"],
                cost_budget=values["cost_budget"],
                cost_model=model,
                padding=values["padding"],
            ),
            **{
                name: values[name]
                for name in (
                    "lookahead",
                    "optimize_for_lookahead",
                    "world_size",
                    "accumulate",
                    "seed",
                    "layout",
                    "block_samples",
                    "num_canonical_nodes",
                )
            },
        )
