"""``manifest.json``: what was built, sealed last, and the fingerprint of the data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """One bucket as built.

    Attributes:
        lower: Lengths in the bucket are above this.
        upper: Longest length the bucket may hold.
        num_samples: Samples.
        num_tokens: Their tokens.
        mean_length: Tokens per sample; 0 when empty.
        batch_size: Rows of a batch whose longest row is at the upper boundary.
        padding_efficiency: Estimate for a shuffle inside the bucket; ``None`` when empty.
        num_shards: Shard files.
        directory: Name of its directory; ``None`` when empty (there is none on disk).
    """

    lower: int
    upper: int
    num_samples: int
    num_tokens: int
    mean_length: float
    batch_size: int
    padding_efficiency: float | None
    num_shards: int
    directory: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of a build.

    Attributes:
        fingerprint: SHA-256 of the data, see :func:`fingerprint`.
        boundaries: ``0 < ... < last``, one more than there are buckets.
        tokens_column: Column of token ids.
        loss_mask_column: Column that is 0 where a token has no loss, or ``None``.
        columns: MDS encoding of each stored column.
        options: What the build was asked for, JSON scalars by the name of the option.
        buckets: One summary per bucket, shortest first; empty buckets keep their place.
        num_samples: Samples of all buckets; likewise ``num_tokens`` and ``num_loss_tokens``.
        counts: Rows or samples by policy: ``over_length_dropped``, ``truncated``, ``split``,
            ``skipped_empty``, ``skipped_null``.
        predicted: ``padding_efficiency`` of a plain bucket shuffle and ``lookahead_padding_efficiency``.
        sources: ``path`` (relative to the common parent), ``num_rows`` and ``num_bytes`` of each file.
        versions: Versions of the libraries that wrote the build.
        format_version: Version of this file's layout.
    """

    fingerprint: str
    boundaries: tuple[int, ...]
    tokens_column: str
    loss_mask_column: str | None
    columns: dict[str, str]
    options: dict[str, Any]
    buckets: tuple[BucketSummary, ...]
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    counts: dict[str, int]
    predicted: dict[str, float | None]
    sources: tuple[dict[str, Any], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise UserError(
                f"{MANIFEST} has format_version {self.format_version}, this release reads {FORMAT_VERSION}: "
                "build the dataset again or use the release that made it"
            )
        if len(self.buckets) != len(self.boundaries) - 1:
            raise UserError(
                f"{MANIFEST} has {len(self.buckets)} buckets for {len(self.boundaries)} boundaries: "
                "it is damaged, build the dataset again"
            )
        total = sum(bucket.num_samples for bucket in self.buckets)
        if total != self.num_samples:
            raise UserError(
                f"{MANIFEST} counts {self.num_samples} samples but its buckets {total}: "
                "it is damaged, build the dataset again"
            )

    def to_json(self) -> dict[str, Any]:
        return {"format_version": self.format_version, **asdict(self)}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any], where: str = MANIFEST) -> Manifest:
        """Parse; a missing or unknown key is a :class:`UserError` that names it."""
        known = {f.name for f in fields(cls)}
        if obj.get("format_version") == FORMAT_VERSION:
            missing = sorted(known - set(obj))
            unknown = sorted(set(obj) - known)
            if missing or unknown:
                raise UserError(
                    f"{where} lacks {missing} and has unknown keys {unknown}: "
                    "it is damaged, build the dataset again"
                )
        try:
            values = {name: obj[name] for name in known if name in obj}
            values["boundaries"] = tuple(values["boundaries"])
            values["buckets"] = tuple(BucketSummary(**bucket) for bucket in values["buckets"])
            values["sources"] = tuple(values.get("sources", ()))
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise UserError(f"{where} is not a manifest of this project: {error}") from error

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Manifest:
        """Read ``manifest.json`` of a built directory.

        Raises:
            UserError: There is none (the directory is no finished dataset), or it cannot be read.
        """
        path = Path(directory) / MANIFEST
        try:
            obj = json.loads(path.read_bytes())
        except FileNotFoundError:
            what = "holds no" if Path(directory).is_dir() else "does not exist, so there is no"
            raise UserError(
                f"{directory} is not a dataset: no {MANIFEST} (the directory {what} finished build); "
                "make one with: python -m shardgen build INPUT --out DIR"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(obj, dict):
            raise UserError(f"{path} is not a JSON object")
        return cls.from_json(obj, str(path))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``manifest.json`` so that it is either absent or whole, and on the disk when this returns."""
        path = Path(directory) / MANIFEST
        temporary = path.with_name(f".{MANIFEST}.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def fingerprint(
    shards: Iterable[tuple[str, int, int, str]],
    lengths: NDArray[np.integer[Any]],
    loss_tokens: NDArray[np.integer[Any]] | None,
) -> str:
    """SHA-256 of the data, hex.

    Args:
        shards: Basename, samples, bytes before compression and hash of each shard, in order.
        lengths: Tokens of each sample by id, shape (N,).
        loss_tokens: Tokens with a loss of each sample, shape (N,), or ``None`` without a mask.

    Never over paths, options or versions: two builds of the same samples have the same fingerprint.
    """
    digest = hashlib.sha256()
    for basename, samples, size, content_hash in shards:
        digest.update(f"{basename}\n{samples}\n{size}\n{content_hash}\n".encode())
    digest.update(b"lengths\n")
    digest.update(np.ascontiguousarray(lengths, "<i4").tobytes())
    digest.update(b"loss_tokens\n")
    if loss_tokens is not None:
        digest.update(np.ascontiguousarray(loss_tokens, "<i4").tobytes())
    return digest.hexdigest()
