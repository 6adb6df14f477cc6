"""Which rows become which samples: rows that are too long, empty or null."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shardgen.errors import UserError

OverLength = Literal["error", "drop", "truncate", "split"]
Skip = Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What to do with rows that cannot be a sample as they are.

    Attributes:
        limit: Longest sample, in tokens.
        limit_name: Where the limit comes from, for messages.
        over_length: For rows above the limit.
        on_empty: For rows without tokens.
        on_null: For rows that are null or hold a null.
    """

    limit: int
    limit_name: str
    over_length: OverLength = "error"
    on_empty: Skip = "error"
    on_null: Skip = "error"

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UserError(f"{self.limit_name}: not even one token fits; raise it")
        for name, value, allowed in (
            ("over_length", self.over_length, get_args(OverLength)),
            ("on_empty", self.on_empty, get_args(Skip)),
            ("on_null", self.on_null, get_args(Skip)),
        ):
            if value not in allowed:
                raise UserError(f"{name} {value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples in source order.

    Attributes:
        rows: Source row of each sample, counted over all files, int64, shape (N,).
        starts: First token inside the row, int32, shape (N,).
        lengths: Tokens, int32, shape (N,).
        counts: ``over_length_dropped, truncated, split, skipped_empty, skipped_null``: rows each
            policy took.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    counts: dict[str, int]


def apply_policies(
    row_lengths: NDArray[np.int32], policies: Policies, where: Callable[[int], str]
) -> Samples:
    """Turn rows into samples.

    Args:
        row_lengths: Tokens of each row, 0 when empty, -1 when null, shape (R,).
        policies: What to do with odd rows.
        where: Names a row for a message.

    Raises:
        UserError: A row needs a policy that is ``error``, or no sample is left.
    """
    null, empty, over = row_lengths < 0, row_lengths == 0, row_lengths > policies.limit
    if null.any() and policies.on_null == "error":
        raise UserError(
            f"{where(int(null.argmax()))} is null or holds a null ({int(null.sum())} such rows): "
            "mend the source or use --on-null skip"
        )
    if empty.any() and policies.on_empty == "error":
        raise UserError(
            f"{where(int(empty.argmax()))} has no tokens ({int(empty.sum())} such rows): "
            "mend the source or use --on-empty skip"
        )
    if over.any() and policies.over_length == "error":
        at = int(over.argmax())
        raise UserError(
            f"{where(at)} has {int(row_lengths[at])} tokens, above the limit of {policies.limit_name} "
            f"({int(over.sum())} such rows): use --over-length drop, truncate or split, or raise the limit"
        )
    keep = ~(null | empty)
    if policies.over_length == "drop":
        keep &= ~over
    rows = keep.nonzero()[0]
    lengths = row_lengths[rows]
    counts = {
        "over_length_dropped": int(over.sum()) if policies.over_length == "drop" else 0,
        "truncated": int(over.sum()) if policies.over_length == "truncate" else 0,
        "split": int(over.sum()) if policies.over_length == "split" else 0,
        "skipped_empty": int(empty.sum()),
        "skipped_null": int(null.sum()),
    }
    starts = np.zeros(len(rows), np.int32)
    if policies.over_length == "truncate":
        lengths = np.minimum(lengths, np.int32(min(policies.limit, np.iinfo(np.int32).max)))
    elif policies.over_length == "split" and over.any():
        pieces = -(-lengths.astype(np.int64) // policies.limit)
        piece = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        whole = np.repeat(lengths, pieces)
        rows = np.repeat(rows, pieces)
        starts = (piece * policies.limit).astype(np.int32)
        lengths = np.minimum(whole - starts, policies.limit).astype(np.int32)
    if not len(rows):
        taken = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        raise UserError(
            f"no sample is left of {len(row_lengths)} rows ({taken or 'there are none'}): name another input"
        )
    return Samples(rows=rows.astype(np.int64), starts=starts, lengths=lengths, counts=counts)
