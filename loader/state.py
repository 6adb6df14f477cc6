"""What a checkpoint holds: where an epoch stands, and how to find the way back to it.

A plan is never saved. The state keeps, for the current block, which options planned it and how many steps
of each plan were done; re-planning those segments gives back the exact multiset of rows that is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.keys import Purpose, derive_key, hash_ids
from loader.options import EpochOptions, PlanOptions
from shardgen.errors import UserError

# What we write, and the oldest reader that understands it. A later version that only adds fields keeps
# MIN_VERSION; such fields are ignored here.
VERSION = 1
MIN_VERSION = 1

_DIGEST_KEY = derive_key(0, Purpose.DIGEST)
_EPOCH_FIELDS = tuple(field.name for field in fields(EpochOptions))


def digest_ids(ids: NDArray[np.int64]) -> int:
    """Order-free 64-bit digest of a multiset of sample ids: the sum of their hashes modulo 2^64."""
    # Unsigned sums wrap, which is the modulus wanted.
    return int(hash_ids(ids, _DIGEST_KEY).sum(dtype=np.uint64))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of a block that were planned with the same options.

    Attributes:
        options: What planned them.
        steps: Finished steps of that plan.
    """

    options: PlanOptions
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"a segment of {self.steps} steps holds nothing")


@dataclass(frozen=True, kw_only=True)
class ResumeState:
    """Position in an epoch, after a finished step.

    Attributes:
        fingerprint: Of the dataset.
        epoch_options: Fixed within the epoch (seed, shuffle, blocks, lanes, weights).
        epoch: Epoch number, from 0.
        block: Current block of the epoch.
        steps_before_block: Steps of this epoch done in earlier blocks.
        segments: Of this block, in order; none at its start.
        num_dealt: Rows that the plans dealt in the finished steps of this block, skipped ones included.
        digest: :func:`digest_ids` of their sample ids.
    """

    fingerprint: str
    epoch_options: EpochOptions
    epoch: int = 0
    block: int = 0
    steps_before_block: int = 0
    segments: tuple[Segment, ...] = ()
    num_dealt: int = 0
    digest: int = 0

    def __post_init__(self) -> None:
        for name in ("epoch", "block", "steps_before_block", "num_dealt", "digest"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"the state's {name} is {value!r}: it must be a whole number from 0")
        if not isinstance(self.fingerprint, str):
            raise UserError(f"the state's fingerprint is {self.fingerprint!r}: it must be a string")

    @property
    def step(self) -> int:
        """Finished steps of the epoch."""
        return self.steps_before_block + sum(segment.steps for segment in self.segments)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; small, because a segment stores only what differs from the one before it."""
        boundaries: list[list[int]] = []
        segments: list[dict[str, Any]] = []
        before: dict[str, Any] = {}
        for segment in self.segments:
            options = _json_options(segment.options)
            delta = {name: value for name, value in options.items() if before.get(name, ...) != value}
            if "boundaries" in delta:
                # The longest value; runs that go back and forth name it by its place in a table.
                if delta["boundaries"] not in boundaries:
                    boundaries.append(delta["boundaries"])
                delta["boundaries"] = boundaries.index(delta["boundaries"])
            segments.append({"steps": segment.steps, **delta})
            before = options
        return {
            "version": VERSION,
            "min_version": MIN_VERSION,
            "fingerprint": self.fingerprint,
            **json.loads(json.dumps(self.epoch_options.to_json())),
            "epoch": self.epoch,
            "block": self.block,
            "steps_before_block": self.steps_before_block,
            "boundaries": boundaries,
            "segments": segments,
            "num_dealt": self.num_dealt,
            "digest": f"{self.digest:016x}",
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> ResumeState:
        """Read :meth:`to_json`; fields added by a later compatible version are ignored.

        Raises:
            UserError: Not such a state, or one that needs a newer version.
        """
        try:
            version, needs = int(obj["version"]), int(obj["min_version"])
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "this is not a state of this loader (no version and min_version): "
                "pass what BucketedDataLoader.state_dict() returned"
            ) from None
        if needs > VERSION:
            raise UserError(
                f"the state has version {version} and needs a loader that reads version {needs}; this one "
                f"reads {VERSION}: upgrade the package, or start the epoch anew"
            )
        try:
            return cls(
                fingerprint=obj["fingerprint"],
                epoch_options=EpochOptions.from_json({name: obj[name] for name in _EPOCH_FIELDS}),
                epoch=obj["epoch"],
                block=obj["block"],
                steps_before_block=obj["steps_before_block"],
                segments=_read_segments(obj["segments"], obj["boundaries"]),
                num_dealt=obj["num_dealt"],
                digest=int(obj["digest"], 16),
            )
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"the state is damaged ({type(error).__name__}: {error})") from error

    def check_fixed(self, fingerprint: str, epoch_options: EpochOptions) -> None:
        """Refuse today's dataset and options where they differ in what is fixed within an epoch."""
        differing = fixed_differences(self, fingerprint, epoch_options)
        if differing:
            raise UserError(
                f"the state was saved within epoch {self.epoch} (after step {self.step}) and these may not "
                f"change before its end: {'; '.join(differing)}; use the saved values, or start a new epoch"
            )


def fixed_differences(state: ResumeState, fingerprint: str, epoch_options: EpochOptions) -> list[str]:
    """One line for each fixed field in which a state and today's values differ."""
    lines = []
    if state.fingerprint != fingerprint:
        lines.append(f"data fingerprint: saved {state.fingerprint[:12]}, now {fingerprint[:12]}")
    for name in _EPOCH_FIELDS:
        saved, now = getattr(state.epoch_options, name), getattr(epoch_options, name)
        if saved != now:
            lines.append(f"{name}: saved {saved}, now {now}")
    return lines


def _json_options(options: PlanOptions) -> dict[str, Any]:
    obj: dict[str, Any] = json.loads(json.dumps(options.to_json()))
    return obj


def _read_segments(items: list[dict[str, Any]], boundaries: list[list[int]]) -> tuple[Segment, ...]:
    segments, options = [], dict[str, Any]()
    for item in items:
        delta = dict(item)
        steps = int(delta.pop("steps"))
        if "boundaries" in delta:
            delta["boundaries"] = boundaries[delta["boundaries"]]
        options = {**options, **delta}
        segments.append(Segment(options=PlanOptions.from_json(options), steps=steps))
    return tuple(segments)
