"""Reading columns of samples, by sample id, from memory-mapped MDS shards."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loader.mds import ArrayEncoding, array_encoding, column_span, decode_value, scalar_dtype, vector_span
from loader.shardfile import Columns, MappedShard, ShardInfo, ShardNotFound
from shardgen.errors import UserError

__all__ = ["Columns", "SampleReader", "ShardInfo", "ShardNotFound", "Vectors"]


def _most_maps() -> int:
    """Maps held at once: before Python 3.13 each keeps a file descriptor, and others need some too."""
    if sys.version_info >= (3, 13):
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft // 2)


# First byte of each row's values and the byte after (as memoryviews of u32: indexing them gives an int three
# times faster than indexing an array), and the file.
_Spans = tuple[memoryview, memoryview, memoryview]


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """One-dimensional arrays of many samples, still in place.

    Attributes:
        parts: Bytes of the values of each sample; views of the maps, at any alignment.
        dtype: Their dtype, little-endian.
        lengths: Values of each sample.
    """

    parts: list[memoryview]
    dtype: np.dtype[Any]
    lengths: list[int]


class SampleReader:
    """Reads columns of samples, by sample id, from memory-mapped raw shards.

    Maps are opened on first use and held until :meth:`drop` or :meth:`close`; values handed out stay valid
    after that. A pickled copy starts without maps; a forked child keeps using the inherited ones.

    Attributes:
        bytes_read: Bytes of the values handed out so far.
    """

    def __init__(
        self,
        shards: Sequence[ShardInfo],
        locate: Callable[[int], str],
        *,
        decode: Callable[[str, bytes], Any] | None = None,
    ) -> None:
        """Args:
        shards: All shards, in sample-id order.
        locate: Path of the raw file of a shard number; called when the shard is opened.
        decode: Decoder ``(encoding, bytes) -> value`` of the encodings that are not read here.
        """
        self.shards = tuple(shards)
        self.bytes_read = 0
        self._locate = locate
        self._decode = decode
        counts = np.array([shard.num_samples for shard in self.shards], np.int64)
        different = next((shard for shard in self.shards if shard.columns != self.shards[0].columns), None)
        if different is not None:
            raise UserError(
                f"shards {self.shards[0].basename} and {different.basename} have different columns: "
                f"{self.shards[0].columns} and {different.columns}; build them together"
            )
        # (shards + 1,) first sample id of each, and the number of samples
        self._bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._most_maps = _most_maps()
        self._open: dict[int, MappedShard] = {}
        # by (column, whether only the values of an array are meant), then by shard
        self._spans: dict[tuple[str, bool], dict[int, _Spans]] = {}
        # rows of open shards that cannot be read by their spans, by the same keys; empty in a good set
        self._odd: dict[tuple[str, bool, int], frozenset[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_spans": {}, "_odd": {}, "bytes_read": 0}

    @property
    def num_samples(self) -> int:
        return int(self._bounds[-1])

    def shard_of(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        """Shard number of every sample id, int64, shape (n,).

        Raises:
            UserError: An id is outside the set.
        """
        ids = np.asarray(sample_ids, np.int64)
        shards = np.searchsorted(self._bounds, ids, side="right") - 1
        if len(ids) and (shards.min() < 0 or shards.max() >= len(self.shards)):
            raise self._outside(ids)
        return shards

    def _outside(self, ids: NDArray[np.int64]) -> UserError:
        wrong = int(ids[(ids < 0) | (ids >= self.num_samples)][0])
        return UserError(f"sample {wrong} is outside the {self.num_samples} samples of the set")

    def open(self, shard: int) -> None:
        """Map a shard now and check its header against the index.

        Raises:
            ShardNotFound: There is no such file.
            UserError: The file is truncated or another shard; names the shard, the sample and the bytes.
        """
        self._shard(shard)

    def drop(self, shard: int) -> None:
        """Let go of a shard's map, as when its file is evicted."""
        self._open.pop(shard, None)
        for spans in list(self._spans.values()):
            spans.pop(shard, None)

    def close(self) -> None:
        """Let go of all maps; reading opens them again."""
        self._open.clear()
        self._spans.clear()
        self._odd.clear()

    def open_shards(self) -> list[int]:
        """Numbers of the shards mapped now."""
        return list(self._open)

    def resident(self) -> int:
        """Number of shards mapped now."""
        return len(self._open)

    def _shard(self, number: int) -> MappedShard:
        shard = self._open.get(number)
        if shard is None:
            shard = MappedShard(self.shards[number], self._locate(number), int(self._bounds[number]))
            while len(self._open) >= self._most_maps:
                self.drop(next(iter(self._open)))
            self._open[number] = shard
        return shard

    def _span(self, number: int, column: str, array: ArrayEncoding | None) -> _Spans:
        shard = self._shard(number)
        sizes, place = shard.info.columns.sizes, shard.info.columns.number(column)
        starts, lengths, good = column_span(shard.data, shard.offsets.astype(np.int64), sizes, place)
        if array is not None:
            starts, good, lengths = vector_span(shard.data, starts, lengths, good, array)
        key = (column, array is not None, number)
        self._odd.pop(key, None)
        if not good.all():
            starts, lengths = np.where(good, starts, 0), np.where(good, lengths, 0)
            self._odd[key] = frozenset(np.flatnonzero(~good).tolist())
        ends = (starts + lengths).astype(np.uint32)
        return memoryview(starts.astype(np.uint32)), memoryview(ends), shard.view  # type: ignore[arg-type]

    def _parts(
        self, sample_ids: NDArray[np.int64], column: str, array: ArrayEncoding | None
    ) -> list[memoryview] | None:
        """Bytes of each value (of an array: of its numbers); ``None`` when one needs a closer look."""
        places = np.searchsorted(self._bounds, sample_ids, side="right") - 1
        numbers, rows = places.tolist(), (sample_ids - self._bounds[places]).tolist()
        key = (column, array is not None)
        spans = self._spans.setdefault(key, {})
        found = []
        for number in numbers:
            span = spans.get(number)
            if span is None:
                # No id outside the set has a span, so only new ones need a look.
                if not 0 <= number < len(self.shards):
                    raise self._outside(sample_ids)
                span = spans[number] = self._span(number, column, array)
            found.append(span)
        if self._odd:
            for number, row in zip(numbers, rows, strict=True):
                if row in self._odd.get((*key, number), ()):
                    return None
        parts = [view[starts[row] : ends[row]] for (starts, ends, view), row in zip(found, rows, strict=True)]
        self.bytes_read += sum(map(len, parts))
        return parts

    def vectors(self, sample_ids: NDArray[np.int64], column: str) -> Vectors:
        """The one-dimensional arrays of a column, without copying them.

        Args:
            sample_ids: Samples, int64, shape (n,).
            column: A column stored as ``ndarray`` in any of its forms.

        Raises:
            UserError: A stored array does not fit its sample or has another number of axes; names the
                shard, the sample and the bytes.
        """
        encoding = self.encoding(column)
        stored = array_encoding(encoding)
        if stored is None:
            raise UserError(f"column {column!r} is stored as {encoding!r}, not as an ndarray")
        parts = self._parts(sample_ids, column, stored) if stored.dtype is not None else None
        if parts is None or stored.dtype is None:
            return self._slow_vectors(sample_ids, column)
        itemsize = stored.dtype.itemsize
        return Vectors(parts=parts, dtype=stored.dtype, lengths=[len(part) // itemsize for part in parts])

    def scalars(self, sample_ids: NDArray[np.int64], column: str) -> NDArray[Any]:
        """The numbers of a column stored as ``int`` or as a numpy scalar, in the stored dtype, shape (n,)."""
        encoding = self.encoding(column)
        dtype = scalar_dtype(encoding)
        if dtype is None:
            raise UserError(f"column {column!r} is stored as {encoding!r}, not as a number of fixed size")
        parts = self._parts(sample_ids, column, None)
        if parts is None:
            return np.array(self._one_by_one(sample_ids, column), dtype)
        return np.frombuffer(b"".join(parts), dtype)

    def values(self, sample_ids: NDArray[np.int64], column: str) -> list[Any]:
        """The decoded values of one column of many samples; arrays are views of the maps.

        Args:
            sample_ids: Samples, int64, shape (n,).
            column: Any column.

        Raises:
            UserError: The bytes are no such value; names the shard, the sample and the bytes.
        """
        encoding = self.encoding(column)
        parts = self._parts(sample_ids, column, None)
        if parts is None:
            return self._one_by_one(sample_ids, column)
        try:
            return [decode_value(encoding, part, self._decode) for part in parts]
        except Exception:
            return self._one_by_one(sample_ids, column)

    def _slow_vectors(self, sample_ids: NDArray[np.int64], column: str) -> Vectors:
        """The same one by one: dtypes stored with each value, and the errors."""
        arrays = self._one_by_one(sample_ids, column)
        for sample, array in zip(sample_ids.tolist(), arrays, strict=True):
            if array.ndim != 1:
                raise UserError(
                    f"{self.name(sample)}: column {column!r} has shape {array.shape}, one axis is needed"
                )
        dtype = np.result_type(*{array.dtype for array in arrays})
        if dtype.kind == "f" and any(array.dtype.kind != "f" for array in arrays):
            raise UserError(
                f"column {column!r} mixes {', '.join(sorted({a.dtype.name for a in arrays}))} in one batch: "
                "store it with one dtype, such as ndarray:int64"
            )
        return Vectors(
            parts=[memoryview(array.astype(dtype).tobytes()) for array in arrays],
            dtype=dtype,
            lengths=[len(array) for array in arrays],
        )

    def encoding(self, column: str) -> str:
        """MDS encoding of a column.

        Raises:
            UserError: There is no such column.
        """
        if not self.shards:
            raise UserError(f"no column {column!r}: the set has no shards")
        columns = self.shards[0].columns
        return columns.encodings[columns.number(column)]

    def name(self, sample: int) -> str:
        """What errors call a sample: its shard, id, row and byte range."""
        number = int(self.shard_of([sample])[0])
        shard, row = self._shard(number), sample - int(self._bounds[number])
        low, high = shard.offsets[row : row + 2].tolist()
        return f"shard {shard.info.basename}, sample {sample} (row {row}) at bytes {low}:{high}"

    def sample(self, sample_id: int, columns: Sequence[str] | None = None) -> dict[str, Any]:
        """The decoded values of one sample; arrays are views of the map.

        Args:
            sample_id: Sample id.
            columns: Columns to decode; all of them by default.

        Raises:
            UserError: The bytes are not what the columns say; names the shard, the sample and the bytes.
        """
        number = int(self.shard_of([sample_id])[0])
        shard, row = self._shard(number), sample_id - int(self._bounds[number])
        stored = shard.info.columns
        at, end = shard.offsets[row : row + 2].tolist()
        num_varying = stored.sizes.count(None)
        head = bytes(shard.view[at : min(at + 4 * num_varying, end)]).ljust(4 * num_varying, b"\0")
        varying = iter(np.frombuffer(head, "<u4").tolist())
        sizes = [next(varying) if size is None else size for size in stored.sizes]
        if 4 * num_varying + sum(sizes) != end - at:
            raise UserError(
                f"{self.name(sample_id)}: {end - at} bytes, but its columns take "
                f"{4 * num_varying + sum(sizes)} "
                f"({', '.join(f'{n} {s}' for n, s in zip(stored.names, sizes, strict=True))}): "
                "the shard is damaged; run `shardgen verify`, or leave the sample out with skip="
            )
        wanted = set(stored.names if columns is None else columns)
        found = {}
        at += 4 * num_varying
        for name, encoding, size in zip(stored.names, stored.encodings, sizes, strict=True):
            if name in wanted:
                try:
                    found[name] = decode_value(encoding, shard.view[at : at + size], self._decode)
                except Exception as error:
                    raise UserError(
                        f"{self.name(sample_id)}: column {name!r} ({encoding}) at bytes {at}:{at + size} "
                        f"cannot be read: {error}"
                    ) from error
                self.bytes_read += size
            at += size
        return found

    def _one_by_one(self, sample_ids: NDArray[np.int64], column: str) -> list[Any]:
        """Slow, but it finds the sample that cannot be read."""
        return [self.sample(sample, [column])[column] for sample in sample_ids.tolist()]
