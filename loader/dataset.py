"""A built directory as a dataset of token-budget batches."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.format.mds.encodings import mds_decode
from streaming.base.storage import CloudDownloader

from loader.arguments import (
    build_option,
    check_longest,
    choose_boundaries,
    cost_model_of,
    refuse_upstream_arguments,
    skip_ids,
)
from loader.batch import Batch
from loader.built import read_corpus
from loader.collate import Collator, Labels
from loader.foreign import SelfIterating
from loader.limits import least_cache_limit
from loader.options import EpochOptions, Layout, PlanOptions, Tail
from loader.passes import Passes
from loader.predownload import NUM_THREADS, Predownloader
from loader.preflight import hardest
from loader.progress import Progress
from loader.reading import BatchReader
from loader.shards import SampleReader, ShardInfo
from loader.source import INDEX, ShardSource
from loader.walk import Plans
from loader.world import detect
from shardgen.buckets import Padding
from shardgen.cost import CostModel
from shardgen.errors import UserError


class BucketedDataset(SelfIterating, ShardSource):
    """Bucketed shards, dealt to all ranks as batches under a token budget, reshuffled each epoch.

    Iterating gives this rank's batches; :class:`~loader.BucketedDataLoader` does it with prefetching, workers
    and an exact restart. ``dataset[i]`` is upstream's sample.
    """

    def __init__(
        self,
        *,
        local: str | None = None,
        remote: str | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        cache_limit: int | str | None = None,
        replication: int | None = None,
        num_canonical_nodes: int = 1,
        token_budget: int | None = None,
        boundaries: Sequence[int] | None = None,
        num_buckets: int | None = None,
        padding: Padding | None = None,
        pad_to_multiple_of: int | None = None,
        max_batch_size: int | None = None,
        cost_model: CostModel | None = None,
        cost_budget: int | None = None,
        lookahead: int = 32,
        accumulate: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        block_samples: int = 262_144,
        layout: Layout = "padded",
        labels: Labels | None = "causal",
        columns: Sequence[str] = (),
        pad_values: Mapping[str, Any] | None = None,
        buckets: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        skip: Iterable[int] = (),
        tail: Tail = "fill",
        predownload_batches: int = 8,
        cache_dir: str | None = None,
        foreign_loader: bool = False,
        **unknown: Any,
    ) -> None:
        """Args:
        local: A built directory; with ``remote``, the cache for it.
        remote: Where to download the dataset from (``s3://...``, ``file://...``, a path).
        split: Subdirectory of ``local`` and ``remote``.
        download_retry: Attempts of each download.
        download_timeout: Seconds for each attempt.
        validate_hash: Hash algorithm to check downloads with.
        keep_zip: Keep the compressed form of downloaded shards.
        cache_limit: Most bytes of the cache, such as ``"100gb"``; needs ``remote``.
        replication: So many consecutive ranks receive the same batches.
        num_canonical_nodes: Lanes: each node then downloads about this fraction of the set.
        token_budget: Most padded tokens of a batch; ``None`` for the build's, as for the next five.
        boundaries: Upper bounds of the buckets to plan with.
        num_buckets: Plan with the best boundaries for so many buckets.
        padding: ``"longest"``, or ``"boundary"`` for static shapes.
        pad_to_multiple_of: Padded lengths are multiples of this.
        max_batch_size: Most rows of a batch.
        cost_model: What a batch costs; ``None`` for the build's.
        cost_budget: Most token-equivalents of a batch; ``None`` for the build's.
        lookahead: Batches per window that is sorted by length; 1 for a plain shuffle.
        accumulate: Micro-steps of an optimizer step.
        shuffle: Whether to shuffle.
        seed: Decides every order.
        block_samples: Samples planned at once, about.
        layout: ``"padded"``, or ``"packed"`` for attention over variable lengths.
        labels: ``"causal"``, ``"tokens"`` or ``None``.
        columns: Further columns to deliver.
        pad_values: Pad value of each column; 0 by default.
        buckets: Built buckets to train on; ``None`` for all.
        weights: Times that each built bucket is delivered per epoch; ``None`` for once.
        skip: Sample ids to leave out; every other batch stays as it is.
        tail: ``"error"`` refuses an epoch whose end needs filler batches.
        predownload_batches: Batches whose shards are downloaded ahead.
        cache_dir: Where downloads go without ``local``, and decompressed copies without ``remote``.
        foreign_loader: Allow iterating outside our loader on several ranks.

        Raises:
            UserError: The directory is no dataset, or a value contradicts it.
            TypeError: An argument of upstream that would contradict a plan.
        """
        refuse_upstream_arguments(unknown)
        if predownload_batches < 0:
            raise UserError(f"predownload_batches {predownload_batches} is negative")
        # An exception keeps its frames, and they would keep the cache in use.
        with self.released_on_error():
            world = detect(replication)
            super().__init__(
                world=world,
                local=local,
                remote=remote,
                split=split,
                download_retry=download_retry,
                download_timeout=download_timeout,
                validate_hash=validate_hash,
                keep_zip=keep_zip,
                cache_limit=cache_limit,
                cache_dir=cache_dir,
            )
            self.world = world
            self.shuffle = shuffle
            self.shuffle_seed = seed
            self.num_canonical_nodes = num_canonical_nodes
            self.predownload_batches = predownload_batches
            self.foreign_loader = foreign_loader
            manifest = self.manifest
            collator = Collator(
                tokens_column=manifest.tokens_column,
                loss_mask_column=manifest.loss_mask_column,
                labels=labels,
                columns=columns,
                pad_values=pad_values,
                layout=layout,
            )
            self._readers: weakref.WeakSet[BatchReader] = weakref.WeakSet()
            self._set_reader(collator)
            corpus = read_corpus(manifest, self.samples_per_shard, self.samples_path, labels)
            model = cost_model_of(manifest, cost_model)
            padding_of_plan: Padding = build_option(manifest, "padding", padding) or "longest"
            limits = {
                "token_budget": build_option(manifest, "token_budget", token_budget),
                "max_batch_size": build_option(manifest, "max_batch_size", max_batch_size),
                "pad_to_multiple_of": build_option(manifest, "pad_to_multiple_of", pad_to_multiple_of) or 1,
                "cost_budget": build_option(manifest, "cost_budget", cost_budget),
                "quadratic_length": model.quadratic_length,
                "overhead_tokens": model.overhead_tokens,
            }
            if layout == "packed" and padding_of_plan == "boundary":
                padding_of_plan = "longest"  # the build's choice is for padded batches
            self.plan_options = PlanOptions(
                boundaries=choose_boundaries(
                    manifest, corpus.lengths, boundaries, num_buckets, padding_of_plan, limits
                ),
                padding=padding_of_plan,
                lookahead=lookahead,
                world_size=world.num_groups,
                accumulate=accumulate,
                layout=layout,
                tail=tail,
                **limits,
            )
            self.epoch_options = EpochOptions(
                seed=seed,
                shuffle=shuffle,
                block_samples=block_samples,
                num_canonical_nodes=num_canonical_nodes,
                buckets=None if buckets is None else tuple(buckets),
                weights=None if weights is None else tuple(weights),
            )
            left_out = skip_ids(skip, self.num_samples)
            check_longest(corpus.lengths, self.plan_options, left_out)
            self.plans = Plans(corpus, manifest.fingerprint, self.epoch_options, left_out)
            self.plans.planner(0)  # refuses buckets and weights that do not fit
            if self.cache_limit:
                self._check_cache_limit()
            self._progress = Progress(self.plans, self.plan_options, world.group)
            self._passes = Passes()
            self._loaders: weakref.WeakSet[Progress] = weakref.WeakSet()
            self._last_progress = None

    # --- what is on the disk --------------------------------------------------------------------------

    def _set_reader(self, collator: Collator) -> None:
        with open(self._fetch(self.streams[0], INDEX), "rb") as file:
            self._infos = ShardInfo.from_index(json.load(file))
        self._collator = collator
        self.batch_reader = self.reader()
        for column in (collator.tokens_column, *collator.columns):
            self.batch_reader.reader.encoding(column)  # refuses names that are not stored

    def storage(self, own_client: bool = False) -> BucketedDataset:
        """A copy that finds shards but holds no plan, so that it is cheap to send to another process.

        Args:
            own_client: Use a client of the remote that no other thread uses.
        """
        storage = copy.copy(self)  # see __getstate__
        for name in ("plans", "_passes", "batch_reader"):
            storage.__dict__.pop(name, None)
        if own_client:
            stream = copy.copy(self.streams[0])
            stream._downloader = CloudDownloader.get(stream.remote)
            storage.streams = [stream]
        return storage

    def reader(self, collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None) -> BatchReader:
        """A reader with its own maps. It holds no plan, so that it is cheap to send to a worker process."""
        storage = self.storage()
        reader = SampleReader(self._infos, storage.raw_path, decode=mds_decode)
        made = BatchReader(storage, reader, self._collator, collate_fn)
        self._readers.add(made)
        return made

    def predownloader(self) -> Predownloader | None:
        """Threads that make shards present ahead of time; ``None`` where all are."""
        if not self.is_shared or not self.predownload_batches:
            return None
        return Predownloader([self._preparer() for _ in range(NUM_THREADS)])

    def _preparer(self) -> Callable[[int], None]:
        storage = self.storage(own_client=True)
        return lambda shard: storage.prepare_shard(shard, blocking=False)

    def preflight_batches(self, n: int = 3) -> list[Batch]:
        """The hardest batches of the next pass, to try before training whether they fit into memory.

        In turn the one with most padded tokens, with most rows, and the costliest, over all ranks and steps:
        the same batches on every rank. Neither position nor order change.

        Args:
            n: How many; fewer where the pass has fewer.
        """
        if n < 1:
            raise UserError(f"n {n} is below 1")
        found = hardest(self.plans, self._active().next_start(), self.plan_options, n)
        return [self._make(task) for task in found]

    def num_resident(self) -> int:
        """Shards mapped by this process."""
        return sum(made.reader.resident() for made in self._readers)

    def _check_cache_limit(self) -> None:
        limit = int(self.cache_limit or 0)
        least = least_cache_limit(
            self.plans,
            self.plan_options,
            self.world,
            np.array([shard.get_max_size() for shard in self.shards], np.int64),
            self.samples_per_shard.cumsum(),
            self.small_bytes(),
        )
        if limit < least:
            raise UserError(
                f"cache_limit {limit} does not hold one block of {self.epoch_options.block_samples} "
                f"samples and the next one's first shards: give at least {least}, or a smaller block_samples="
            )

    @property
    def lengths(self) -> NDArray[np.integer[Any]]:
        """Tokens of each sample by id, shape (num_samples,)."""
        return self.plans.corpus.lengths

    # --- copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_last_progress", "_loaders", "_progress", "_readers"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._loaders, self._readers, self._last_progress = weakref.WeakSet(), weakref.WeakSet(), None
        if self.__dict__.get("plans") is not None:
            self._progress = Progress(self.plans, self.plan_options, self.world.group)
