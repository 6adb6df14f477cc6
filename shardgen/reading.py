"""Rows of a task as payloads: values of the stored type, checked against what the first pass said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.columns import Lists, lists_of, null_mask, numbers, plain, text_of
from shardgen.encode import Payload
from shardgen.errors import UserError
from shardgen.layout import Column
from shardgen.scan import check_stored
from shardgen.tasks import Task


class RaggedColumnError(Exception):
    """A list column that was taken to have one value per token has another length in some row."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """The samples of one batch of rows, N of them in source order.

    Attributes:
        first_sample: Sample of the task that comes first.
        last_sample: One past the last.
        payloads: Values of each stored column.
        loss_tokens: Tokens with a loss, int32, shape (N,), or (0,) without a mask.
        first_token_loss: Whether the first token has a loss, bool, shape (N,), or (0,).
    """

    first_sample: int
    last_sample: int
    payloads: Mapping[str, Payload]
    loss_tokens: NDArray[np.int32]
    first_token_loss: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """How source rows become payloads.

    Attributes:
        columns: Stored columns.
        tokens_column: Column of tokens.
        loss_mask_column: Column of the loss mask, or ``None``.
        length_column: Column of lengths that the first pass relied on, or ``None``; named in messages.
    """

    columns: Sequence[Column]
    tokens_column: str
    loss_mask_column: str | None
    length_column: str | None

    def batches(self, task: Task, max_rows: int) -> Iterator[StoredRows]:
        """The samples of a task, batch by batch.

        Raises:
            UserError: A row differs from the first pass, holds a null, or a value does not fit.
            RaggedColumnError: See there.
        """
        names = [column.name for column in self.columns]
        row = 0
        for batch in task.source.batches(
            names, task.first_partition, task.last_partition, max_rows, threads=False
        ):
            yield self._convert(task, batch, row)
            row += batch.num_rows
        if row != len(task.row_lengths):
            raise UserError(
                f"{task.source.path} has {task.first_row + row} rows where the first pass saw "
                f"{task.first_row + len(task.row_lengths)}: it changed while being read; build again"
            )

    def _convert(self, task: Task, batch: Any, row: int) -> StoredRows:
        last_row = row + batch.num_rows
        first, last = np.searchsorted(task.rows, [row, last_row]).tolist()
        view = _Batch(task=task, first_row=row, chosen=slice(first, last))
        arrays = {
            column.name: batch.column(batch.schema.get_field_index(column.name)) for column in self.columns
        }
        tokens = lists_of(arrays[self.tokens_column])
        self._check_lengths(view, tokens, batch.num_rows)
        payloads: dict[str, Payload] = {}
        loss = np.zeros(0, np.int32)
        first_loss = np.zeros(0, np.bool_)
        for column in self.columns:
            if column.kind == "scalar":
                payloads[column.name] = view.scalars(column, arrays[column.name])
                continue
            if column.kind == "text":
                rows = text_of(arrays[column.name])
            else:
                rows = tokens if column.name == self.tokens_column else lists_of(arrays[column.name])
            if column.kind == "aligned":
                if column.name != self.tokens_column:
                    self._check_aligned(view, column.name, rows, tokens)
                payloads[column.name] = view.aligned(column, rows)
            else:
                payloads[column.name] = view.whole(column, rows)
            if column.name == self.loss_mask_column:
                loss, first_loss = _losses(payloads[column.name])
        return StoredRows(
            first_sample=first,
            last_sample=last,
            payloads=payloads,
            loss_tokens=loss,
            first_token_loss=first_loss,
        )

    def _check_lengths(self, view: _Batch, tokens: Lists, num_rows: int) -> None:
        said = view.task.row_lengths[view.first_row : view.first_row + num_rows]
        real = np.where(tokens.null | tokens.null_item, -1, tokens.num_items)
        new_null = (real == -1) & (said != -1)
        if new_null.any():
            raise UserError(
                f"{view.where(int(new_null.argmax()))} is null or holds a null "
                f"({int(new_null.sum())} such rows here): mend the source or use --on-null skip"
            )
        path, first_row = view.task.source.path, view.task.first_row + view.first_row
        check_stored(said, real, path, first_row, self.length_column or self.tokens_column)

    def _check_aligned(self, view: _Batch, name: str, rows: Lists, tokens: Lists) -> None:
        used = view.used_rows
        wrong = rows.num_items[used] != tokens.num_items[used]
        if wrong.any():
            if name != self.loss_mask_column:
                raise RaggedColumnError(name)
            at = int(used[int(wrong.argmax())])
            raise UserError(
                f"{view.where(at)}: column {name!r} has {int(rows.num_items[at])} values for "
                f"{int(tokens.num_items[at])} tokens: a loss mask has one value per token"
            )


class _Batch:
    """One batch of a task: rows ``first_row...`` and the samples ``chosen`` that lie in them."""

    def __init__(self, *, task: Task, first_row: int, chosen: slice) -> None:
        self.task, self.first_row = task, first_row
        self.rows = task.rows[chosen] - first_row  # row of each sample inside the batch, shape (N,)
        self.starts, self.lengths = task.starts[chosen], task.lengths[chosen]
        self.used_rows = self.rows[self.starts == 0]

    def where(self, row: int) -> str:
        return f"{self.task.source.path} row {self.task.first_row + self.first_row + row}"

    def _refuse_nulls(self, column: Column, null: NDArray[np.bool_]) -> None:
        bad = null[self.rows]
        if bad.any():
            raise UserError(
                f"{self.where(int(self.rows[int(bad.argmax())]))}: column {column.name!r} is null or holds a "
                "null, which a shard cannot store: mend the source or leave the column out of --columns"
            )

    def scalars(self, column: Column, array: Any) -> Payload:
        array = plain(array)
        self._refuse_nulls(column, null_mask(array))
        values = numbers(array)[self.rows]
        ones = np.ones(len(values), np.int64)
        return Payload(
            values=values.astype(column.dtype, copy=False), starts=ones, num_items=ones, scalar=True
        )

    def aligned(self, column: Column, rows: Lists) -> Payload:
        self._refuse_nulls(column, rows.null | rows.null_item)
        values = self._cast(column, rows)
        return Payload(values=values, starts=rows.starts[self.rows] + self.starts, num_items=self.lengths)

    def whole(self, column: Column, rows: Lists) -> Payload:
        self._refuse_nulls(column, rows.null | rows.null_item)
        num_items = rows.num_items[self.rows]
        if column.kind == "ragged" and not num_items.all():
            at = int(self.rows[int(num_items.argmin())])
            raise UserError(
                f"{self.where(at)}: column {column.name!r} is an empty list, which a shard cannot store: "
                "mend the source or leave the column out of --columns"
            )
        values = rows.values if column.kind == "text" else self._cast(column, rows)
        return Payload(values=values, starts=rows.starts[self.rows], num_items=num_items)

    def _cast(self, column: Column, rows: Lists) -> NDArray[np.generic]:
        """Values in the stored type; one that does not fit is refused, never wrapped."""
        values = rows.values
        if values.dtype == column.dtype or not len(values):
            return np.ascontiguousarray(values.astype(column.dtype, copy=False))
        if column.dtype.kind in "iu":
            info = np.iinfo(column.dtype.name)
            if int(values.min()) < info.min or int(values.max()) > info.max:
                self._refuse_values(column, rows, int(info.min), int(info.max))
        return values.astype(column.dtype)

    def _refuse_values(self, column: Column, rows: Lists, low: int, high: int) -> None:
        """Name the first row that uses a value outside ``low..high``; values between rows do not count."""
        for row in self.used_rows.tolist():
            used = rows.values[int(rows.starts[row]) : int(rows.starts[row] + rows.num_items[row])]
            if len(used) and (int(used.min()) < low or int(used.max()) > high):
                value = int(used.max()) if int(used.max()) > high else int(used.min())
                raise UserError(
                    f"{self.where(row)}: value {value} of column {column.name!r} does not fit "
                    f"{column.dtype.name} although the file's statistics say so: "
                    "the file is damaged; use --token-dtype int64"
                )


def _losses(mask: Payload) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Tokens with a loss of each sample, and whether its first token has one."""
    counted = np.concatenate([[0], np.cumsum(mask.values != 0)])
    loss = counted[mask.starts + mask.num_items] - counted[mask.starts]
    return loss.astype(np.int32), np.asarray(mask.values[mask.starts] != 0)
