"""Training side: token-budget batches from bucketed shards, the same for any workers, exactly resumable.

Names are imported on first use: the planner needs numpy only, and importing MosaicML Streaming costs seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.batch import Batch, BatchMeta
    from loader.dataloader import BucketedDataLoader
    from loader.dataset import BucketedDataset

_HOMES = {
    "Batch": "loader.batch",
    "BatchMeta": "loader.batch",
    "BucketedDataLoader": "loader.dataloader",
    "BucketedDataset": "loader.dataset",
}

__all__ = ["Batch", "BatchMeta", "BucketedDataLoader", "BucketedDataset"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
