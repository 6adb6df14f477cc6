"""What a running loader can say of itself."""

from __future__ import annotations

import time
from collections import Counter

from loader.batch import BatchMeta


class Meter:
    """Counts one pass; a few additions per batch.

    The clock starts with the first batch, so that planning and opening files count neither as work nor as
    waiting.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.padded_tokens = 0
        self.bytes_read = 0
        self.num_fillers = 0
        self.wait_seconds = 0.0
        self._first_tokens = 0
        self._began: float | None = None
        self._ended: float | None = None
        self._samples: Counter[int] = Counter()

    def note(self, meta: BatchMeta, padded_tokens: int, num_bytes: int, waited: float) -> None:
        """Count a batch as it is handed out.

        Args:
            meta: Its record.
            padded_tokens: Elements of its token tensor.
            num_bytes: Stored bytes that were read for it.
            waited: Seconds that the training loop waited for it.
        """
        if self._began is None:
            self._began = time.perf_counter()
            self._first_tokens = meta.num_tokens
        else:
            self.wait_seconds += waited
        self.num_tokens += meta.num_tokens
        self.padded_tokens += padded_tokens
        self.bytes_read += num_bytes
        self.num_fillers += meta.filler
        self._samples[meta.bucket] += len(meta.sample_ids)

    def end(self) -> None:
        """Stop the clock."""
        if self._ended is None:
            self._ended = time.perf_counter()

    def values(self) -> dict[str, float]:
        """Flat record; a ratio is 0 while nothing was counted."""
        began = self._began
        seconds = 0.0 if began is None else (self._ended or time.perf_counter()) - began
        values = {
            "padding_efficiency": self.num_tokens / self.padded_tokens if self.padded_tokens else 0.0,
            "tokens_per_s": (self.num_tokens - self._first_tokens) / seconds if seconds > 0 else 0.0,
            "data_wait_fraction": min(1.0, self.wait_seconds / seconds) if seconds > 0 else 0.0,
            "bytes_read": float(self.bytes_read),
            "fillers": float(self.num_fillers),
        }
        for bucket, samples in sorted(self._samples.items()):
            values[f"bucket_{bucket}_samples"] = float(samples)
        return values
