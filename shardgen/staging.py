"""The directory under construction: beside its destination, published by one rename."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Sequence

from shardgen.errors import UserError
from shardgen.journal import DIRECTORY
from shardgen.manifest import MANIFEST, Manifest

RENAME_EXCHANGE = 2
AT_FDCWD = -100


def own_files(manifest: Manifest, directory: str) -> set[str]:
    """Paths that a build may hold, relative to its directory: from the manifest and the index it names."""
    import json

    names = {MANIFEST, "index.json"}
    for bucket in manifest.buckets:
        if bucket.directory is None:
            continue
        names |= {f"{bucket.directory}/index.json", f"{bucket.directory}/samples.parquet"}
        try:
            with open(os.path.join(directory, bucket.directory, "index.json"), encoding="utf-8") as file:
                shards = json.load(file)["shards"]
        except (OSError, ValueError, KeyError):
            continue
        for shard in shards:
            for key in ("raw_data", "zip_data"):
                if shard.get(key):
                    names.add(f"{bucket.directory}/{shard[key]['basename']}")
    return names


def _files(directory: str) -> Iterable[str]:
    for root, _, names in os.walk(directory):
        for name in names:
            yield os.path.relpath(os.path.join(root, name), directory)


def check_destination(out: str, inputs: Sequence[str], *, overwrite: bool) -> str:
    """The real path of ``--out``, or a refusal.

    Args:
        out: What the user asked for.
        inputs: Source files and the directories they were found in.
        overwrite: Whether an earlier build may be replaced.

    Raises:
        UserError: ``out`` is an input or holds one, is no directory, holds foreign files, or holds a
            build and ``overwrite`` is off.
    """
    target = os.path.realpath(out)
    for path in inputs:
        real = os.path.realpath(path)
        if real == target or real.startswith(target.rstrip(os.sep) + os.sep):
            raise UserError(f"--out {out} is the input {path} or holds it: choose another --out")
    if not os.path.lexists(target):
        return target
    if not os.path.isdir(target):
        raise UserError(f"--out {out} is a file: choose another --out")
    if not os.listdir(target):
        return target
    if not os.path.isfile(os.path.join(target, MANIFEST)):
        foreign = min(_files(target), default=os.listdir(target)[0])
        raise UserError(
            f"--out {out} is not empty and is no build of ours (it holds {foreign}): choose another --out"
        )
    if not overwrite:
        raise UserError(
            f"--out {out} holds a finished build: use --overwrite to replace it, or another --out"
        )
    own = own_files(Manifest.load(target), target)
    foreign_files = sorted(set(_files(target)) - own)
    if foreign_files:
        raise UserError(
            f"--out {out} holds files that are not of the build (such as {foreign_files[0]}): "
            "move them away or choose another --out"
        )
    return target


def fsync_file(path: str) -> None:
    """Force a file's bytes to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: str) -> None:
    """Force a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: str, b: str) -> bool:
    """Swap two directories in one step; False where the kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE)
    return bool(done == 0)


class Staging:
    """A temporary sibling of the destination, held by one process at a time.

    Attributes:
        target: Destination.
        directory: Where to build.
        upload: Called with each finished file; ``None``: files stay where they are written.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.upload: Callable[[str], None] | None = None
        parent, name = os.path.split(target)
        self.directory = os.path.join(parent, f".{name}.building")
        self._lock: int | None = None
        self._made: list[str] = []

    def open(self, *, resume: bool, overwrite: bool) -> None:
        """Make and lock the directory.

        Args:
            resume: Keep what a killed build left there.
            overwrite: Throw it away.

        Raises:
            UserError: Another build holds it, or a killed build left it and neither was asked for.
        """
        parent = os.path.dirname(self.directory)
        while not os.path.isdir(parent):
            self._made.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(self.directory, exist_ok=True)
        self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise UserError(f"another build of {self.target} is running: wait for it to end") from None
        shutil.rmtree(f"{self.directory}.old", ignore_errors=True)  # left by a build killed at its very end
        names = os.listdir(self.directory)
        if not names:
            return
        if DIRECTORY in names:
            if resume:
                return
            if not overwrite:
                self.close()
                raise UserError(
                    f"{self.directory} holds a killed build: use --resume to go on with it, "
                    "or --overwrite to start anew"
                )
        elif MANIFEST not in names:
            self.close()
            raise UserError(f"{self.directory} is in the way and is no build of ours: move it away")
        self._clear()

    def _clear(self) -> None:
        # The marker goes last: a directory without it is taken for somebody else's.
        for name in sorted(os.listdir(self.directory), key=lambda name: name == DIRECTORY):
            path = os.path.join(self.directory, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def publish(self, manifest: Manifest) -> None:
        """Seal the directory and put it in its place: one rename, or one swap with an earlier build."""
        manifest.save(self.directory)
        for root, _, _ in os.walk(self.directory):
            fsync_directory(root)
        old = f"{self.directory}.old"
        if os.path.isdir(self.target) and os.listdir(self.target):
            if _exchange(self.directory, self.target):
                os.rename(self.directory, old)
            else:
                os.rename(self.target, old)
                os.rename(self.directory, self.target)
        else:
            os.rename(self.directory, self.target)
        fsync_directory(os.path.dirname(self.target))
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove the directory, whatever is in it, and the parents that were made for it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for path in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
