"""Samples to tensors: stage 1 copies the stored bytes out of the maps, stage 2 widens, pads and masks them.

The two stages let a worker process send the narrow bytes through a pipe and leave the wide tensors to the
receiver; in one process they run back to back.

How the bytes are gathered was chosen by measurement (2,037 tokens a sample, uint16, 24 rows a batch, one
core; thousand samples/s for ids, mask and labels): joining memoryviews into one narrow rectangle and widening
that in one go 336, a numpy assignment per row into the same rectangle 299, widening each row straight into
the int64 tensor 285, a torch copy per row 168 (ids alone). The narrow rectangle stays in the cache, so two
short passes beat one of many small pieces, and nothing has to be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loader.columns import finish_column, pad_value, read_column
from loader.raw import RawBatch, joined
from loader.shards import SampleReader
from shardgen.errors import UserError

IGNORED = -100  # the label that torch's losses leave out

Labels = Literal["causal", "tokens"]
Layout = Literal["padded", "packed"]


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of a padded batch's tensors.

    Attributes:
        num_rows: Rows; more than there are samples only with static shapes.
        padded_length: Tokens per row.
    """

    num_rows: int
    padded_length: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.padded_length < 1:
            raise UserError(f"a batch of {self.num_rows} rows x {self.padded_length} tokens is empty")


class Collator:
    """Turns sample ids into the tensors of one batch.

    ``padded`` gives ``input_ids`` int64 (B, L), ``attention_mask`` bool (B, L) and ``labels`` int64 (B, L).
    ``packed`` gives all rows one after another: ``input_ids`` int64 (T,), ``position_ids`` int64 (T,),
    ``labels`` int64 (T,), ``cu_seqlens`` int32 (n + 1,) and ``max_seqlen``, an int.

    Labels are the input ids, but -100 on padding, where the loss mask is 0 and, with ``"causal"``, at
    position 0 of each row (a causal loss shifts the labels, so that one never counts).

    Other columns keep their dtype and their name: arrays whose first axis is the row's tokens in every row of
    the batch are padded along it (B, L, ...) (packed: joined (T, ...)), numbers of fixed size are stacked
    (B,), the rest are lists, arrays in them tensors.
    """

    def __init__(
        self,
        *,
        tokens_column: str = "input_ids",
        loss_mask_column: str | None = None,
        labels: Labels | None = "causal",
        columns: Sequence[str] = (),
        pad_values: Mapping[str, Any] | None = None,
        layout: Layout = "padded",
    ) -> None:
        """Args:
        tokens_column: Column with the tokens, an integer ``ndarray`` of one axis.
        loss_mask_column: Column with one number per token, 0 where the label does not count.
        labels: ``"causal"``, ``"tokens"`` (position 0 counts too) or ``None`` for no labels.
        columns: Further columns to deliver.
        pad_values: By column, what stands in padding and in the missing rows of static shapes; 0 by
            default. Naming an array column here also says that its first axis is the tokens.
        layout: ``"padded"`` or ``"packed"``.

        Raises:
            UserError: The arguments contradict each other.
        """
        if labels not in ("causal", "tokens", None):
            raise UserError(f"labels={labels!r}: use 'causal', 'tokens' or None")
        if layout not in ("padded", "packed"):
            raise UserError(f"layout={layout!r}: use 'padded' or 'packed'")
        self.tokens_column = tokens_column
        self.loss_mask_column = loss_mask_column
        self.labels = labels
        self.columns = tuple(column for column in dict.fromkeys(columns) if column != tokens_column)
        self.pad_values = dict(pad_values or {})
        self.layout = layout
        made = ["input_ids", "labels"] if labels else ["input_ids"]
        made += ["attention_mask"] if layout == "padded" else ["position_ids", "cu_seqlens", "max_seqlen"]
        for column in self.columns:
            if column in made:
                raise UserError(f"columns: {column!r} is made by the loader; rename the stored column")
        known = {tokens_column, *self.columns}
        for column in self.pad_values:
            if column not in known:
                raise UserError(f"pad_values: {column!r} is none of the columns {', '.join(sorted(known))}")
        self.pad_token = int(
            pad_value(tokens_column, self.pad_values.get(tokens_column, 0), np.dtype(np.int64))
        )

    def __call__(
        self,
        reader: SampleReader,
        sample_ids: NDArray[np.int64],
        shape: BatchShape,
        *,
        filler: bool = False,
        lengths: NDArray[np.int64] | None = None,
    ) -> dict[str, Any]:
        """Read and finish one batch; see :meth:`read` and :meth:`finish`."""
        return self.finish(self.read(reader, sample_ids, lengths), shape, filler=filler)

    def read(
        self, reader: SampleReader, sample_ids: NDArray[np.int64], lengths: NDArray[np.int64] | None = None
    ) -> RawBatch:
        """Stage 1: copy the rows out of the maps, as stored.

        Args:
            reader: Where the samples are.
            sample_ids: Rows of the batch, in order, int64, shape (n,).
            lengths: The tokens they should have, shape (n,); not checked by default.

        Raises:
            UserError: A sample cannot be read, or is not as long as it should be; names the shard, the
                sample and the bytes.
        """
        ids = np.asarray(sample_ids, np.int64)
        tokens = reader.vectors(ids, self.tokens_column)
        if tokens.dtype.kind not in "iu":
            raise UserError(f"tokens column {self.tokens_column!r} holds {tokens.dtype.name}, not integers")
        if lengths is not None:
            expected = np.asarray(lengths).tolist()
            _check_lengths(reader, ids, self.tokens_column, tokens.lengths, expected, "the set's lengths say")
        num_tokens = np.array(tokens.lengths, np.int64)
        width = max(tokens.lengths, default=0) if self.layout == "padded" else None
        loss: NDArray[np.bool_] | None = None
        if self.loss_mask_column is not None and self.labels is not None:
            mask = reader.vectors(ids, self.loss_mask_column)
            column = self.loss_mask_column
            _check_lengths(reader, ids, column, mask.lengths, tokens.lengths, "its tokens are")
            loss = np.frombuffer(joined(mask, width), mask.dtype) != 0
        return RawBatch(
            sample_ids=ids,
            lengths=num_tokens,
            tokens=joined(tokens, width),
            dtype=tokens.dtype.str,
            loss=loss,
            columns={
                column: read_column(
                    reader,
                    ids,
                    column,
                    num_tokens,
                    tokens_encoding=reader.encoding(self.tokens_column),
                    must_be_padded=column in self.pad_values,
                )
                for column in self.columns
            },
        )

    def finish(self, raw: RawBatch, shape: BatchShape, *, filler: bool = False) -> dict[str, Any]:
        """Stage 2: the tensors.

        Args:
            raw: What :meth:`read` gave, here or in another process.
            shape: Shape of the tensors; ignored by the packed layout, which pads nothing. Rows that are
                missing in ``raw`` come after the real ones: one pad token, attended to, and labels -100 (a
                row without any attention gives NaN gradients).
            filler: Make every label -100.

        Raises:
            UserError: The rows do not fit the shape, or a pad value does not fit its column's dtype.
        """
        return (self._packed if self.layout == "packed" else self._padded)(raw, shape, filler)

    def _padded(self, raw: RawBatch, shape: BatchShape, filler: bool) -> dict[str, Any]:
        num_real, num_rows, length = len(raw.lengths), shape.num_rows, shape.padded_length
        dtype = np.dtype(raw.dtype)
        longest = len(raw.tokens) // (num_real * dtype.itemsize) if num_real else 0
        if num_real > num_rows or longest > length:
            row = int(raw.lengths.argmax()) if num_real else 0
            raise UserError(
                f"{num_real} rows up to {longest} tokens (sample {raw.sample_ids[row]}) do not fit a batch "
                f"of {num_rows} rows x {length} tokens"
            )
        stored = np.frombuffer(raw.tokens, dtype).reshape(num_real, longest)  # (n, longest)
        full = (num_real, longest) == (num_rows, length)
        limits = raw.lengths
        if num_rows > num_real:
            limits = np.concatenate([limits, np.ones(num_rows - num_real, np.int64)])
        real, padding = real_and_padding(limits, length)

        def widened(pad: int) -> NDArray[np.int64]:
            if full:
                wide = stored.astype(np.int64)
            else:
                wide = np.zeros((num_rows, length), np.int64)
                wide[:num_real, :longest] = stored
                wide[num_real:, 0] = pad
            if pad:
                wide.reshape(-1)[padding] = pad
            return wide

        batch: dict[str, Any] = {"input_ids": torch.from_numpy(_checked(widened(self.pad_token), raw))}
        batch["attention_mask"] = torch.from_numpy(real)
        if self.labels is not None:
            if filler:
                labels = np.full((num_rows, length), IGNORED, np.int64)
            else:
                labels = widened(IGNORED)
                if raw.loss is not None:
                    masked = raw.loss.reshape(num_real, longest)
                    np.copyto(labels[:num_real, :longest], IGNORED, where=~masked)
                if self.labels == "causal":
                    labels[:, 0] = IGNORED
            batch["labels"] = torch.from_numpy(labels)
        for name, column in raw.columns.items():
            pad = self.pad_values.get(name, 0)
            batch[name] = finish_column(name, column, raw.lengths, pad, (num_rows, length))
        return batch

    def _packed(self, raw: RawBatch, shape: BatchShape, filler: bool) -> dict[str, Any]:
        del shape
        ends = np.cumsum(raw.lengths)
        total = int(ends[-1]) if len(ends) else 0
        if total > np.iinfo(np.int32).max:
            raise UserError(
                f"{total} tokens in one packed batch: cu_seqlens has 32 bits; lower the token budget"
            )
        starts = ends - raw.lengths
        ids = np.frombuffer(raw.tokens, raw.dtype).astype(np.int64)  # (T,)
        batch: dict[str, Any] = {"input_ids": torch.from_numpy(_checked(ids, raw))}
        batch["position_ids"] = torch.from_numpy(np.arange(total) - np.repeat(starts, raw.lengths))
        if self.labels is not None:
            labels = np.full(total, IGNORED, np.int64) if filler else ids.copy()
            if raw.loss is not None:
                labels[~raw.loss] = IGNORED
            if self.labels == "causal":
                labels[starts] = IGNORED
            batch["labels"] = torch.from_numpy(labels)
        batch["cu_seqlens"] = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
        batch["max_seqlen"] = int(raw.lengths.max(initial=0))
        for name, column in raw.columns.items():
            batch[name] = finish_column(name, column, raw.lengths, self.pad_values.get(name, 0), None)
        return batch


def real_and_padding(limits: NDArray[np.int64], length: int) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Where the tokens are, bool (B, L), and an index of all other cells of a flattened (B, L) array.

    A few padding cells are listed, many are a mask: listing costs 5 ns a cell, a mask 0.4 ns for every cell.
    """
    num_rows = len(limits)
    gaps = length - limits  # (B,)
    ends = np.cumsum(gaps)
    num_padding = int(ends[-1])
    if num_padding * 16 < num_rows * length:
        first = np.arange(length, (num_rows + 1) * length, length) - ends
        cells = np.repeat(first, gaps) + np.arange(num_padding)
        real = np.ones((num_rows, length), np.bool_)
        real.reshape(-1)[cells] = False
        return real, cells
    # Comparing narrow integers takes half as long.
    narrow = np.dtype(np.uint16 if length <= np.iinfo(np.uint16).max else np.int64)
    ends_of_rows: NDArray[Any] = limits.astype(narrow)
    real = np.arange(length, dtype=narrow) < ends_of_rows[:, None]  # (B, L)
    return real, ~real.reshape(-1)


def _checked(wide: NDArray[np.int64], raw: RawBatch) -> NDArray[np.int64]:
    """``wide`` unless uint64 tokens did not fit into it."""
    if raw.dtype == "<u8" and (np.frombuffer(raw.tokens, raw.dtype) > np.iinfo(np.int64).max).any():
        raise UserError("a uint64 token is above 2**63 - 1 and fits no int64 tensor: store int64 tokens")
    return wide


def _check_lengths(
    reader: SampleReader,
    sample_ids: NDArray[np.int64],
    column: str,
    found: list[int],
    expected: list[int],
    what: str,
) -> None:
    if found == expected:
        return
    row = next(row for row, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    raise UserError(
        f"{reader.name(int(sample_ids[row]))}: column {column!r} holds {found[row]} values, but {what} "
        f"{expected[row]}: run `shardgen verify`, build the set again, or leave the sample out with skip="
    )
