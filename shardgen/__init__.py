"""Length buckets for PyTorch and MosaicML Streaming: provably best boundaries, and shards written fast."""

__version__ = "0.1.0"
