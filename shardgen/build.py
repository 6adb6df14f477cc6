"""Lengths, boundaries, shards, seal: the whole build."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen import storage
from shardgen.buckets import Buckets
from shardgen.errors import UserError
from shardgen.execute import Run, Written
from shardgen.formats import SourceFile
from shardgen.journal import Journal, identity
from shardgen.lengths import Histogram
from shardgen.manifest import Manifest
from shardgen.optimize import OptimizeResult, estimate_efficiency
from shardgen.options import BuildOptions
from shardgen.pools import Pool, WorkerKilledError, open_pool
from shardgen.prepare import Prepared, find_boundaries, lay_out_build
from shardgen.progress import Progress
from shardgen.reading import RaggedColumnError
from shardgen.remote import RemoteStaging, check_remote
from shardgen.seal import seal
from shardgen.sources import open_sources
from shardgen.staging import Staging, check_destination


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A finished build.

    Attributes:
        out: Where it is.
        manifest: Its record.
        plan: How its boundaries were found.
        full_shuffle_efficiency: Expected padding efficiency of one bucket for all, at lookahead 1.
        seconds: Time it took.
    """

    out: str
    manifest: Manifest
    plan: OptimizeResult
    full_shuffle_efficiency: float
    seconds: float

    @property
    def hand_picked_efficiency(self) -> float | None:
        """Expected padding efficiency of hand-picked boundaries at lookahead 1."""
        hand = self.plan.alternatives.get("hand")
        return None if hand is None else hand.padding_efficiency

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        record = self.manifest.to_json()
        kept = (
            "fingerprint",
            "num_samples",
            "num_tokens",
            "num_loss_tokens",
            "boundaries",
            "columns",
            "counts",
        )
        return {
            "out": self.out,
            **{name: record[name] for name in kept},
            **self.manifest.predicted,
            "hand_picked_efficiency": self.hand_picked_efficiency,
            "full_shuffle_efficiency": self.full_shuffle_efficiency,
            "token_budget": record["options"]["token_budget"],
            "buckets": record["buckets"],
            "seconds": self.seconds,
            "samples_per_second": self.manifest.num_samples / max(self.seconds, 1e-9),
        }


def build(
    inputs: Sequence[str], out: str, options: BuildOptions, progress: Progress | None = None
) -> BuildResult:
    """Build a dataset from source files.

    Args:
        inputs: Files, directories and globs.
        out: Directory to make, or a URI such as ``s3://bucket/prefix``.
        options: What to build.
        progress: Callbacks.

    Raises:
        UserError: Anything the user can mend; the destination is then as it was.
    """
    began = time.perf_counter()
    progress = progress or Progress()
    options.policies()  # refuse a senseless limit before anything is read
    from shardgen.upstream import check_format

    check_format(options.compression, options.hashes)
    sources = open_sources(inputs, options.split)
    staging = _stage(inputs, sources, out, options)
    ragged: set[str] = set()
    while True:
        plan = _Plan(options)
        try:
            # Workers start while lengths are read and boundaries found.
            with open_pool(options, sum(source.num_bytes for source in sources)) as pool:
                prepared = lay_out_build(sources, options, plan, progress, ragged)
                manifest = _write(staging, pool, prepared, plan.found, options, progress)
            break
        except RaggedColumnError as error:  # rare: equal counts in every row group, but not in every row
            ragged.add(error.column)
    lengths = prepared.samples.lengths
    one = Buckets(boundaries=(0, int(lengths.max())))
    return BuildResult(
        out=out,
        manifest=manifest,
        plan=plan.found,
        full_shuffle_efficiency=estimate_efficiency(Histogram.from_lengths(lengths), one, options.budget, 1),
        seconds=time.perf_counter() - began,
    )


class _Plan:
    """Finds boundaries and remembers what it found."""

    found: OptimizeResult

    def __init__(self, options: BuildOptions) -> None:
        self._options = options

    def __call__(self, lengths: NDArray[np.int32]) -> Buckets:
        self.found = find_boundaries(lengths, self._options)
        return Buckets(boundaries=self.found.boundaries)


def _stage(
    inputs: Sequence[str], sources: Sequence[SourceFile], out: str, options: BuildOptions
) -> Staging | RemoteStaging:
    """Where to build, once it is sure that the destination may be written."""
    named = [*inputs, *(source.path for source in sources)]
    if storage.is_remote(out):
        return RemoteStaging(check_remote(out, named, resume=options.resume, overwrite=options.overwrite))
    local = [path for path in map(storage.local_path, named) if os.path.exists(path)]
    return Staging(check_destination(storage.local_path(out), local, overwrite=options.overwrite))


def _write(
    staging: Staging | RemoteStaging,
    pool: Pool,
    prepared: Prepared,
    plan: OptimizeResult,
    options: BuildOptions,
    progress: Progress,
) -> Manifest:
    """Write, seal and publish; what can be resumed stays, anything else is removed on failure."""
    from shardgen.write import WriteJob

    staging.open(resume=options.resume, overwrite=options.overwrite)
    journal = Journal(staging.directory)
    try:
        if not journal.begin(identity(prepared, options)) and options.resume:
            progress.note("nothing to resume: starting anew")
        job = WriteJob(
            directory=staging.directory, format=prepared.format, reader=prepared.reader, memory=options.memory
        )
        written: Written = Run(job, prepared, pool, journal, progress, staging.upload)()
        progress.start("sealing", 0)
        manifest = seal(staging.directory, prepared, plan, written, options)
        journal.remove()
        staging.publish(manifest)
        return manifest
    except (KeyboardInterrupt, WorkerKilledError) as error:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        done = journal.count_tasks()
        if not done:
            staging.discard()
            raise UserError(what) from error
        raise UserError(
            f"{what}; {done} of {len(prepared.tasks)} partitions are kept in {staging.directory}: "
            "--resume goes on, --overwrite starts anew"
        ) from error
    except BaseException:
        if not journal.is_of_another_build:
            staging.discard()
        raise
    finally:
        staging.close()
