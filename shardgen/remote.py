"""Builds that go straight to an object store: shards are uploaded as they are finished, the manifest last."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence

from shardgen import storage
from shardgen.errors import UserError
from shardgen.manifest import MANIFEST, Manifest
from shardgen.staging import Staging

PROBE = ".write-probe"


def check_remote(out: str, inputs: Sequence[str], *, resume: bool, overwrite: bool) -> str:
    """The URI without a trailing slash, or a refusal.

    Raises:
        UserError: It is an input, holds one, or is not empty. An object store cannot swap two prefixes
            in one step, so that a build there is never replaced.
    """
    target = out.rstrip("/")
    for path in inputs:
        if path.rstrip("/") == target or path.startswith(f"{target}/"):
            raise UserError(f"--out {out} is the input {path} or holds it: choose another --out")
    if storage.kind_of(target) != "directory":
        return target
    names = storage.listing(target)
    if MANIFEST in names:
        hint = " (a build in an object store cannot be replaced in one step)" if overwrite else ""
        raise UserError(f"--out {out} holds a finished build: choose another --out{hint}")
    if names and not resume:
        raise UserError(f"--out {out} is not empty (it holds {names[0]}): choose another --out, or --resume")
    return target


class RemoteStaging(Staging):
    """A local directory whose finished files move to the destination.

    It lies in the directory for temporary files, under a name that follows from the destination, so
    that a killed build is found again.
    """

    def __init__(self, target: str) -> None:
        name = f"shardgen-{hashlib.sha256(target.encode()).hexdigest()[:16]}"
        super().__init__(os.path.join(tempfile.gettempdir(), name))
        self.target = target
        self.upload = self._send
        self._sent: list[str] = []

    def open(self, *, resume: bool, overwrite: bool) -> None:
        super().open(resume=resume, overwrite=overwrite)
        try:
            from streaming.base.storage.upload import CloudUploader

            # `exist_ok`: the directory may hold what a killed build left
            self._uploader = CloudUploader.get((self.directory, self.target), exist_ok=True)
            self._probe()
        except UserError:
            raise
        except Exception as error:  # whatever the store's client raises
            if not resume:
                self.discard()
            self.close()
            raise UserError(
                f"--out {self.target} cannot be written: {' '.join(str(error).split())}"
            ) from error

    def _probe(self) -> None:
        """Write and delete a small file: a missing permission shows before the work, not after it."""
        with open(os.path.join(self.directory, PROBE), "wb") as file:
            file.write(b"write probe\n")
        self._uploader.upload_file(PROBE)
        self._delete(PROBE)

    def _delete(self, name: str) -> None:
        system, inner = storage.file_system(storage.join(self.target, name))
        system.delete_file(inner)

    def _send(self, name: str) -> None:
        """Send one file; it is removed here once it is there."""
        try:
            self._uploader.upload_file(name)
        except Exception as error:
            raise UserError(
                f"{storage.join(self.target, name)} cannot be written: {' '.join(str(error).split())}"
            ) from error
        self._sent.append(name)

    def publish(self, manifest: Manifest) -> None:
        """Send the small files, the manifest last."""
        for root, _, names in os.walk(self.directory):
            for name in sorted(names):
                self._send(os.path.relpath(os.path.join(root, name), self.directory))
        manifest.save(self.directory)
        self._send(MANIFEST)
        super().discard()

    def discard(self) -> None:
        """Remove the local directory and what was sent."""
        for name in self._sent:
            with contextlib.suppress(Exception):
                self._delete(name)
        self._sent.clear()
        super().discard()
