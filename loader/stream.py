"""Downloads whose files appear whole or not at all, whatever the backend and whenever it is killed."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

from streaming import Stream

# Unfinished files carry their process; boto3 appends to the name it is given.
PART = re.compile(r"\.(\d+)-\d+\.part")


class DownloadError(OSError):
    """A file could not be had from the remote."""


class AtomicStream(Stream):
    """Upstream's stream, working on names of its own until a file is complete."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        final = os.path.join(self.local, self.split, to_basename or from_basename)
        part = f"{to_basename or from_basename}.{os.getpid()}-{threading.get_ident()}.part"
        part_path = os.path.join(self.local, self.split, part)
        try:
            super()._download_file(from_basename, part)
            os.replace(part_path, final)
        except Exception as error:
            raise DownloadError(
                f"{from_basename} could not be downloaded from {self.remote} in {self.download_retry} "
                f"attempts: {type(error).__name__}: {error}"
            ) from error
        finally:
            Path(part_path).unlink(missing_ok=True)
        return final

    def _decompress_shard_part(
        self, zip_info: Any, zip_filename: str, raw_filename: str, compression: str | None
    ) -> None:
        part = f"{raw_filename}.{os.getpid()}-{threading.get_ident()}.part"
        try:
            super()._decompress_shard_part(zip_info, zip_filename, part, compression)
            os.replace(part, raw_filename)
        finally:
            for leftover in (part, part + ".tmp"):
                Path(leftover).unlink(missing_ok=True)
