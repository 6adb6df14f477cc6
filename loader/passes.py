"""Epochs and states seen by the worker processes of somebody else's DataLoader.

Such workers iterate copies of the dataset. They find here which epoch comes next: each counts its own passes,
so that none has to wait for another, and a state that was loaded meanwhile reaches workers that live on.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np

from shardgen.errors import UserError

MOST_WORKERS = 1024
_STATE_BYTES = 1 << 18
_HEAD = 3  # generation, first epoch, bytes of the state
_NUM_BYTES = 8 * (_HEAD + MOST_WORKERS) + _STATE_BYTES


class Passes:
    """Memory shared by a process, its forked children, and copies that it pickles for spawned ones."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("shardgen-passes", os.MFD_CLOEXEC)
        else:  # no name is left behind here either
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _NUM_BYTES)
        self._open(fd)

    def _open(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        self._map = mmap.mmap(fd, _NUM_BYTES)
        words = np.frombuffer(self._map, np.int64, _HEAD + MOST_WORKERS)
        self._head, self._counts = words[:_HEAD], words[_HEAD:]

    def __getstate__(self) -> dict[str, Any]:
        # The kernel frees this memory with its last user, so a kill leaves nothing.
        return {"path": f"/proc/{self._pid}/fd/{self._fd}", "content": bytes(self._map[: 8 * _HEAD])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            fd = os.open(state["path"], os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size != _NUM_BYTES:
                raise OSError("another file")
        except OSError:  # unpickled elsewhere or later: a copy of its own
            Passes.__init__(self)
            self._head[1] = np.frombuffer(state["content"], np.int64)[1]
            return
        self._open(fd)

    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None and self._pid == os.getpid():
            os.close(fd)

    @property
    def generation(self) -> int:
        """Number of resets so far."""
        return int(self._head[0])

    @property
    def first_epoch(self) -> int:
        """Epoch of the first pass since the last reset."""
        return int(self._head[1])

    @property
    def next_epoch(self) -> int:
        """Epoch of the pass that no worker has begun."""
        return self.first_epoch + int(self._counts.max())

    def reset(self, epoch: int, state: bytes = b"") -> None:
        """Make the next pass that of ``epoch``, continuing from a state if one is given."""
        if len(state) > _STATE_BYTES:
            raise UserError(f"a state of {len(state)} bytes is above the limit of {_STATE_BYTES}")
        self._map[_NUM_BYTES - _STATE_BYTES : _NUM_BYTES - _STATE_BYTES + len(state)] = state
        self._counts[:] = 0
        self._head[1:] = (epoch, len(state))
        self._head[0] += 1

    def state(self) -> bytes:
        """What the last reset gave."""
        begin = _NUM_BYTES - _STATE_BYTES
        return bytes(self._map[begin : begin + int(self._head[2])])

    def begin(self, worker: int) -> int:
        """Count a pass of a worker; how many it had begun before."""
        if worker >= MOST_WORKERS:
            raise UserError(f"worker {worker} is above the limit of {MOST_WORKERS} workers per rank")
        before = int(self._counts[worker])
        self._counts[worker] = before + 1
        return before
