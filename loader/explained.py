"""What ``shardgen explain`` answers: plans of a build by place, sample and state, with sources."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.built import SAMPLES, read_corpus, read_samples
from loader.explain import find_batch, find_sample, left_ids, num_micro_steps
from loader.options import EpochOptions, PlanOptions, Tail
from loader.state import ResumeState
from loader.walk import Plans
from shardgen.errors import UserError
from shardgen.manifest import Manifest

_SOURCE_COLUMNS = ("source_file", "source_row", "source_start")


def read_state(path: str) -> ResumeState:
    """A state from a JSON file: what ``state_dict()`` gave, or an object that has it as ``loader``.

    Raises:
        UserError: It cannot be read, or is none.
    """
    try:
        obj = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a JSON file: {error}") from error
    if isinstance(obj, dict) and "loader" in obj and "segments" not in obj:
        obj = obj["loader"]
    if not isinstance(obj, dict):
        raise UserError(f"{path} holds no loader state")
    return ResumeState.from_json(obj)


@dataclass(frozen=True, kw_only=True)
class Explainer:
    """A build and the plans of it.

    Attributes:
        directory: The build.
        manifest: Its record.
        plans: Its plans.
        options: What plans them; with a state, those that it was saved with unless asked otherwise.
        state: A saved position, or ``None``.
        shards: Basename of every shard, in order.
        shard_ends: Sample id after the last of each shard, int64, shape (num_shards,).
    """

    directory: str
    manifest: Manifest
    plans: Plans
    options: PlanOptions
    state: ResumeState | None
    shards: tuple[str, ...]
    shard_ends: NDArray[np.int64]

    @classmethod
    def open(cls, directory: str, options: Mapping[str, Any], state_path: str | None) -> Explainer:
        """Read a build, and a state if one is named.

        Args:
            directory: The build.
            options: Parameters of the running command, by name.
            state_path: JSON file of a state.

        Raises:
            UserError: Something cannot be read, or the state is of other data.
        """
        from shardgen.cli_options import Planning
        from shardgen.cli_planning import best_boundaries, epoch_options_of, plan_options_of

        manifest = Manifest.load(directory)
        state = None if state_path is None else read_state(state_path)
        index = json.loads((Path(directory) / "index.json").read_bytes())["shards"]
        sizes = np.array([shard["samples"] for shard in index], np.int64)
        corpus = read_corpus(manifest, sizes, lambda d: os.path.join(directory, d, SAMPLES), "causal")
        built: dict[str, Any] = {**manifest.options, "boundaries": list(manifest.boundaries)}
        tail: Tail = "fill"
        epoch_options: EpochOptions | None = None
        if state is not None:
            if state.fingerprint != manifest.fingerprint:
                raise UserError(
                    f"the state is of a dataset with fingerprint {state.fingerprint[:12]}, {directory} has "
                    f"{manifest.fingerprint[:12]}: name the directory it was saved with"
                )
            epoch_options = state.epoch_options
            built |= {
                name: getattr(epoch_options, name)
                for name in ("seed", "block_samples", "num_canonical_nodes")
            }
            if state.segments:
                last = state.segments[-1].options
                built |= last.to_json()
                tail = last.tail
        planning = Planning.of(options, built)
        planning.budget.check_longest(corpus.lengths)
        boundaries = best_boundaries(corpus.lengths, planning)
        plan_options = replace(plan_options_of(planning, boundaries), tail=tail)
        return cls(
            directory=directory,
            manifest=manifest,
            plans=Plans(
                corpus,
                manifest.fingerprint,
                epoch_options or epoch_options_of(planning),
                np.zeros(0, np.int64),
            ),
            options=plan_options,
            state=state,
            shards=tuple(shard["raw_data"]["basename"] for shard in index),
            shard_ends=np.cumsum(sizes),
        )

    def _epoch(self, epoch: int | None) -> int:
        if epoch is not None:
            return epoch
        return self.state.epoch if self.state is not None else 0

    def batches(self, epoch: int | None, step: int, micro_step: int | None, rank: int) -> dict[str, Any]:
        """One batch of a rank, or all of a step."""
        epoch = self._epoch(epoch)
        place = {"epoch": epoch, "step": step, "rank": rank}
        numbers, found = [micro_step or 0], []
        _, run = find_batch(self.plans, self.options, state=self.state, micro_step=micro_step or 0, **place)
        if micro_step is None:
            numbers = list(range(num_micro_steps(run, step)))
        for number in numbers:
            batch, _ = find_batch(self.plans, self.options, state=self.state, micro_step=number, **place)
            found.append(
                {
                    "micro_step": number,
                    "bucket": batch.bucket,
                    "filler": batch.filler,
                    "num_rows": batch.num_rows,
                    "padded_length": batch.padded_length,
                    "samples": [] if batch.filler else self.origins(batch.sample_ids),
                }
            )
        return {**place, "block": run.begin.block, "batches": found}

    def sample(self, epoch: int | None, sample_id: int) -> dict[str, Any]:
        """Where a sample came from, and when it is delivered."""
        num_samples = self.plans.corpus.num_samples
        if sample_id >= num_samples:
            raise UserError(f"sample {sample_id} is outside 0..{num_samples - 1}")
        epoch = self._epoch(epoch)
        deliveries = find_sample(self.plans, self.options, sample_id, epoch=epoch, state=self.state)
        return {
            "epoch": epoch,
            **self.origins(np.array([sample_id]))[0],
            "deliveries": [asdict(delivery) for delivery in deliveries],
        }

    def position(self) -> dict[str, Any]:
        """What the state says."""
        state = self.state
        assert state is not None
        num_blocks = self.plans.planner(state.epoch).num_blocks
        before: dict[str, Any] = {}
        segments = []
        for segment in state.segments:
            options = segment.options.to_json()
            changed = {name: value for name, value in options.items() if before.get(name, ...) != value}
            wanted = ("world_size", "accumulate", "token_budget", "lookahead", "layout")
            segments.append(
                {
                    "steps": segment.steps,
                    **{name: options[name] for name in wanted},
                    "options": changed,
                }
            )
            before = options
        return {
            "epoch": state.epoch,
            "step": state.step,
            "block": state.block,
            "num_blocks": num_blocks,
            "seed": state.epoch_options.seed,
            "samples_done_in_block": state.num_dealt,
            "samples_left_in_block": len(left_ids(self.plans, state)),
            "segments": segments,
        }

    def origins(self, sample_ids: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Length, shard and source of samples.

        Args:
            sample_ids: int64, shape (n,).
        """
        corpus = self.plans.corpus
        built_bucket = np.searchsorted(corpus.bucket_start, sample_ids, side="right") - 1
        shards = np.searchsorted(self.shard_ends, sample_ids, side="right")
        sources: dict[int, Any] = {}
        for bucket in np.unique(built_bucket).tolist():
            directory = self.manifest.buckets[bucket].directory
            path = os.path.join(self.directory, str(directory), SAMPLES)
            sources[bucket] = read_samples(path, _SOURCE_COLUMNS)
        found = []
        for sample, bucket, shard in zip(
            sample_ids.tolist(), built_bucket.tolist(), shards.tolist(), strict=True
        ):
            row = sample - int(corpus.bucket_start[bucket])
            file, source_row, start = (sources[bucket][name][row].as_py() for name in _SOURCE_COLUMNS)
            before = int(self.shard_ends[shard - 1]) if shard else 0
            found.append(
                {
                    "sample_id": sample,
                    "length": int(corpus.lengths[sample]),
                    "source": self.manifest.sources[file]["path"],
                    "source_row": source_row,
                    "source_start": start,
                    "built_bucket": bucket,
                    "shard": self.shards[shard],
                    "shard_row": sample - before,
                }
            )
        return found
