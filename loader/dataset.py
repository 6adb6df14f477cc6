"""A built directory as a dataset of token-budget batches."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from streaming.base.format.mds.encodings import mds_decode
from torch.utils.data import get_worker_info

from loader.arguments import (
    build_option,
    check_longest,
    choose_boundaries,
    cost_model_of,
    refuse_upstream_arguments,
    skip_ids,
)
from loader.batch import Batch
from loader.collate import Collator, Labels
from loader.options import EpochOptions, Layout, PlanOptions, Tail
from loader.passes import Passes
from loader.pool import Corpus
from loader.progress import Progress, Session
from loader.reading import BatchReader, finish, order_of
from loader.shards import SampleReader, ShardInfo
from loader.source import INDEX, ShardSource
from loader.state import ResumeState
from loader.walk import Plans, tasks
from loader.world import World, detect
from shardgen.buckets import Padding
from shardgen.cost import CostModel
from shardgen.errors import UserError


class BucketedDataset(ShardSource):
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
        corpus = self._read_corpus(labels)
        model = cost_model_of(manifest, cost_model)
        padding = build_option(manifest, "padding", padding) or "longest"
        limits = {
            "token_budget": build_option(manifest, "token_budget", token_budget),
            "max_batch_size": build_option(manifest, "max_batch_size", max_batch_size),
            "pad_to_multiple_of": build_option(manifest, "pad_to_multiple_of", pad_to_multiple_of) or 1,
            "cost_budget": build_option(manifest, "cost_budget", cost_budget),
            "quadratic_length": model.quadratic_length,
            "overhead_tokens": model.overhead_tokens,
        }
        if layout == "packed" and padding == "boundary":
            padding = "longest"  # the build's choice is for padded batches
        self.plan_options = PlanOptions(
            boundaries=choose_boundaries(manifest, corpus.lengths, boundaries, num_buckets, padding, limits),
            padding=padding,
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
        self._progress = Progress(self.plans, self.plan_options, world.group)
        self._passes = Passes()
        self._generation = 0
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

    def reader(self, collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None) -> BatchReader:
        """A reader with its own maps. It holds no plan, so that it is cheap to send to a worker process."""
        storage = copy.copy(self)  # see __getstate__
        for name in ("plans", "_passes", "batch_reader"):
            storage.__dict__.pop(name, None)
        reader = SampleReader(self._infos, storage.raw_path, decode=mds_decode)
        made = BatchReader(storage, reader, self._collator, collate_fn)
        self._readers.add(made)
        return made

    def num_resident(self) -> int:
        """Shards mapped by this process."""
        return sum(made.reader.resident() for made in self._readers)

    def _read_corpus(self, labels: Labels | None) -> Corpus:
        masked = self.manifest.loss_mask_column is not None
        names = ["length", "loss_tokens", "first_token_loss"] if masked else ["length"]
        lengths, loss_tokens, shard_sizes = [], [], []
        first_shard = 0
        for bucket in self.manifest.buckets:
            sizes = self.samples_per_shard[first_shard : first_shard + bucket.num_shards]
            first_shard += bucket.num_shards
            shard_sizes.append(sizes.copy())
            if bucket.directory is None:
                continue
            path = self.samples_path(bucket.directory)
            try:
                table = pq.read_table(path, columns=names)
            except (OSError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {error}; build the dataset again") from error
            if table.num_rows != bucket.num_samples or int(sizes.sum()) != bucket.num_samples:
                raise UserError(
                    f"{path} has {table.num_rows} rows and its shards {int(sizes.sum())} samples, but the "
                    "manifest "
                    f"counts {bucket.num_samples}: build the dataset again"
                )
            lengths.append(table["length"].to_numpy())
            if masked and labels is not None:
                first = table["first_token_loss"].to_numpy().astype(np.int32)
                loss_tokens.append(table["loss_tokens"].to_numpy() - (first if labels == "causal" else 0))
            elif labels == "causal":
                loss_tokens.append(lengths[-1] - 1)  # position 0 never counts
        return Corpus(
            lengths=np.concatenate(lengths),
            loss_tokens=np.concatenate(loss_tokens) if loss_tokens else None,
            shard_sizes=tuple(shard_sizes),
        )

    @property
    def lengths(self) -> NDArray[np.integer]:
        """Tokens of each sample by id, shape (num_samples,)."""
        return self.plans.corpus.lengths

    # --- iterating outside our loader -------------------------------------------------------------------

    def check_world(self) -> None:
        """Refuse to go on when the ranks are not those of the construction."""
        now = detect(self.replication)
        if (now.rank, now.num_ranks) != (self.world.rank, self.world.num_ranks):
            raise UserError(
                f"the dataset was made on rank {self.world.rank} of {self.world.num_ranks} and is "
                "iterated on rank "
                f"{now.rank} of {now.num_ranks}: make it after init_process_group, on each rank"
            )

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next epoch; inside a worker process, that worker's share of them.

        Raises:
            UserError: Several ranks, and neither our loader nor ``foreign_loader=True``.
        """
        if self.world.num_ranks > 1 and not self.foreign_loader:
            raise UserError(
                f"this dataset was made for rank {self.world.rank} of {self.world.num_ranks} and already "
                "gives each "
                "rank its own batches: iterate BucketedDataLoader(dataset), or, if another loader must "
                "do it and "
                "will not shard or dispatch again, say foreign_loader=True"
            )
        worker = get_worker_info()
        return self._iterate_here() if worker is None else self._iterate_share(worker.id, worker.num_workers)

    def _iterate_here(self) -> Iterator[Any]:
        self.check_world()
        if self._passes.next_epoch != self._passes.first_epoch:  # workers have gone on meanwhile
            self._progress.set_epoch(self._passes.next_epoch)
        session = self._progress.begin()
        self._passes.reset(session.epoch + 1)
        self._generation = self._passes.generation
        try:
            for task in session.tasks:
                batch = self._make(task)
                self._progress.take(
                    task, batch.meta.sample_ids if isinstance(batch, Batch) else task.planned.sample_ids
                )
                yield batch
        finally:
            self._progress.end(session)

    def _iterate_share(self, worker: int, num_workers: int) -> Iterator[Any]:
        passes = self._passes
        before = passes.begin(worker)
        start = self.plans.at(passes.first_epoch + before)
        state = passes.state()
        if before == 0 and state:
            start = ResumeState.from_json(json.loads(state))
        for number, task in enumerate(tasks(self.plans, start, self.plan_options, self.world.group)):
            if number % num_workers == worker:
                yield self._make(task)

    def _make(self, task: Any) -> Any:
        reader = self.batch_reader
        raw = reader.read(order_of(task, self.plans.corpus))
        return finish(raw, task, self.plans.corpus, reader.collator, pin_memory=False)[0]

    def __len__(self) -> int:
        """Batches that the next pass gives this rank; ``num_samples`` counts samples."""
        return self._progress.num_batches()

    @property
    def next_epoch(self) -> int:
        """Epoch of the next pass."""
        return max(self._passes.next_epoch, self._progress.next_start().epoch)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._progress.set_epoch(epoch)
        self._passes.reset(epoch)

    # --- state ------------------------------------------------------------------------------------------

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Position as plain JSON types.

        Args:
            num_samples: Samples over all ranks since the epoch's start, as Composer counts them; between two
                steps it means the earlier one. ``None``: what this process has iterated.
            from_beginning: Whether ``num_samples`` counts from the epoch's start, or from where this pass began.

        Raises:
            UserError: Samples and rows do not correspond (fillers, static shapes, packed layout).
        """
        progress = self._active()
        if num_samples is None:
            return progress.state().to_json()
        start = None
        if self._passes.next_epoch > self._passes.first_epoch:  # another loader's workers iterate
            start = self.plans.at(self._passes.next_epoch - 1)
            if self._passes.next_epoch == self._passes.first_epoch + 1 and self._passes.state():
                start = ResumeState.from_json(json.loads(self._passes.state()))
        return progress.state_at(num_samples, from_beginning, start).to_json()

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Make the next pass continue from a state; loaders of this dataset follow.

        Raises:
            UserError: The state does not fit; nothing is changed then.
        """
        self._progress.load(obj)
        for progress in list(self._loaders):
            progress.load(obj)
        state = self._progress.next_start()
        self._passes.reset(state.epoch, json.dumps(state.to_json()).encode())

    def note_iterated(self, progress: Progress) -> None:
        """Remember whose position :meth:`state_dict` is asked for."""
        self._last_progress: weakref.ref[Progress] | None = weakref.ref(progress)

    def _active(self) -> Progress:
        """Progress of the loader that iterated last, else this dataset's own."""
        return (self._last_progress and self._last_progress()) or self._progress

    def new_progress(self) -> Progress:
        """A position for one more loader; a state loaded before counts for it too."""
        progress = Progress(self.plans, self.plan_options, self.world.group)
        if self._progress.has_loaded:
            progress.load(self._progress.state().to_json())
        self._loaders.add(progress)
        return progress

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


__all__ = ["BucketedDataset", "Session", "World"]
