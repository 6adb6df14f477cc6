"""One machine's view of a download cache, shared by all processes that use it.

Everything lives in a small directory under the temp directory, named after the cache it describes:

    <temp>/shardgen-<uid>/door        guards the opening and closing of markers; the only file that stays
    <temp>/shardgen-<uid>/<key>/live  the marker: every living user holds a shared flock on it
    <temp>/shardgen-<uid>/<key>/lock  guards shard states
    <temp>/shardgen-<uid>/<key>/states  mapped by all: state, owner and last use of each shard, bytes in use

Locks of a killed process vanish with it, so whoever comes first after a crash finds the marker free and
starts from what lies on the disk. No shared memory segment is ever created, so none can leak.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardgen.errors import UserError

POLL_SECONDS = 0.01
# The locks are mostly held for microseconds; a wait for a download comes to the longer pause soon.
FIRST_POLL_SECONDS = 0.0002
# Nobody holds these locks for longer than some bookkeeping; a longer wait means that something is broken.
LOCK_SECONDS = 60.0


class FileMutex:
    """Mutual exclusion of threads and processes by a lock file, which the kernel frees when its owner dies.

    Args:
        path: The lock file, made when missing.
        seconds: Longest wait.
    """

    def __init__(self, path: Path, seconds: float = LOCK_SECONDS) -> None:
        self.path = path
        self.seconds = seconds
        self._fresh()

    def _fresh(self) -> None:
        self._pid = os.getpid()
        self._thread = threading.Lock()
        self._fd: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "seconds": self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __enter__(self) -> FileMutex:
        if self._pid != os.getpid():
            # A forked copy shares the parent's open file and with it the parent's lock: open our own.
            self._fresh()
        deadline = time.monotonic() + self.seconds
        if not self._thread.acquire(timeout=self.seconds):
            raise TimeoutError(f"another thread has held {self.path} for {self.seconds:.0f} s")
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                pause = FIRST_POLL_SECONDS
                while not try_lock(fd, fcntl.LOCK_EX):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process has held {self.path} for {self.seconds:.0f} s")
                    time.sleep(pause)
                    pause = min(2 * pause, POLL_SECONDS)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            self._thread.release()
            raise
        self._fd = fd
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            # A child forked meanwhile has a copy of the descriptor, so closing ours would not unlock.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None
        self._thread.release()


def try_lock(fd: int, kind: int) -> bool:
    """Take an flock without waiting; whether it was free."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def runtime_root() -> Path:
    """Our directory under the temp directory; private to the user.

    Raises:
        UserError: Somebody else owns it.
    """
    root = Path(tempfile.gettempdir()) / f"shardgen-{os.getuid()}"
    with suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    if root.lstat().st_uid != os.getuid() or not root.is_dir():
        raise UserError(f"{root} belongs to somebody else: set TMPDIR to a directory of your own")
    return root


class CacheMarker:
    """Says that this process uses a cache directory, for as long as it lives.

    Args:
        local: The cache directory; its real path is its identity.
    """

    def __init__(self, local: str) -> None:
        self.local = os.path.realpath(local)
        self._enter()

    def _enter(self) -> None:
        root = runtime_root()
        key = hashlib.blake2b(self.local.encode(), digest_size=10).hexdigest()
        self.directory = root / key
        self._pid = os.getpid()
        with FileMutex(root / "door"):
            _sweep(root, keep=key)
            self.directory.mkdir(mode=0o700, exist_ok=True)
            self._fd = os.open(self.directory / "live", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if try_lock(self._fd, fcntl.LOCK_EX):
                # No living user: what the dead ones noted is worth nothing.
                (self.directory / "states").unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.lock = FileMutex(self.directory / "lock")
        self.fetch = FileMutex(self.directory / "fetch")

    def __getstate__(self) -> dict[str, Any]:
        return {"local": self.local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.local = state["local"]
        self._enter()

    def close(self) -> None:
        """Let go of the marker; its directory goes with the last user."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd < 0:
            return
        if self._pid != os.getpid():
            os.close(fd)  # a forked copy shares the lock: changing it would change the parent's
            return
        try:
            with FileMutex(self.directory.parent / "door"):
                if try_lock(fd, fcntl.LOCK_EX):
                    shutil.rmtree(self.directory, ignore_errors=True)
        except (OSError, TimeoutError):
            pass  # the next user sweeps it
        finally:
            os.close(fd)

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _sweep(root: Path, keep: str) -> None:
    """Remove what dead users left; the caller holds the door."""
    for entry in os.scandir(root):
        if entry.name == keep or not entry.is_dir(follow_symlinks=False):
            continue
        live = Path(entry.path) / "live"
        try:
            fd = os.open(live, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # not a marker's directory
        try:
            if try_lock(fd, fcntl.LOCK_EX):
                shutil.rmtree(entry.path, ignore_errors=True)
        finally:
            os.close(fd)


def process_alive(pid: int) -> bool:
    """Whether a process of this machine lives; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        pass
    except OSError:
        return True
    if os.path.isdir("/proc/self"):
        return False
    try:  # no /proc on this platform
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[Callable[[], None]]:
    """Gives a function that sleeps a little, and raises once the time is over.

    Raises:
        TimeoutError: Naming what was waited for.
    """
    end = time.monotonic() + seconds

    def wait() -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(POLL_SECONDS)

    yield wait
