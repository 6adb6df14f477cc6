"""Paths and URIs: local files memory-mapped, others through pyarrow's file systems."""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

from shardgen.errors import UserError


def is_remote(path: str) -> bool:
    """Whether a path is a URI of another file system."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    """A local path without its ``file://``."""
    return path.removeprefix("file://")


@functools.lru_cache(maxsize=16)
def _s3(endpoint: str | None) -> Any:
    from pyarrow import fs

    if endpoint is None:
        return fs.S3FileSystem()
    address = urlparse(endpoint if "://" in endpoint else f"https://{endpoint}")
    return fs.S3FileSystem(endpoint_override=address.netloc, scheme=address.scheme)


def file_system(path: str) -> tuple[Any, str]:
    """The pyarrow file system of a URI and the path inside it.

    S3 takes its endpoint from ``S3_ENDPOINT_URL`` (as streaming does) or ``AWS_ENDPOINT_URL``.
    """
    from pyarrow import fs

    if not is_remote(path):
        return fs.LocalFileSystem(), os.path.abspath(local_path(path))
    scheme, _, rest = path.partition("://")
    if scheme in ("s3", "s3a", "s3n"):
        endpoint = os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")
        return _s3(endpoint), rest
    try:
        system, inner = fs.FileSystem.from_uri(path)
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(f"{path} is on no file system that can be read here: {text}") from error
    return system, inner


def open_input(path: str) -> Any:
    """A random-access Arrow file: mapped when local, so that its pages are not anonymous memory."""
    import pyarrow as pa

    if not is_remote(path):
        return pa.memory_map(local_path(path), "rb")
    system, inner = file_system(path)
    return system.open_input_file(inner)


def read_bytes(path: str, size: int = -1) -> bytes:
    """The first ``size`` bytes of a file, all by default."""
    if not is_remote(path):
        with open(local_path(path), "rb") as file:
            return file.read(size)
    with open_input(path) as file:
        return bytes(file.read(None if size < 0 else size))


def join(directory: str, name: str) -> str:
    """A name inside a directory."""
    return posixpath.join(directory, name) if is_remote(directory) else os.path.join(directory, name)


def kind_of(path: str) -> str | None:
    """``file``, ``directory``, or ``None`` when there is nothing."""
    if not is_remote(path):
        path = local_path(path)
        return "directory" if os.path.isdir(path) else "file" if os.path.exists(path) else None
    from pyarrow import fs

    system, inner = file_system(path)
    with _named(path):
        found = system.get_file_info(inner.rstrip("/")).type
    return {fs.FileType.File: "file", fs.FileType.Directory: "directory"}.get(found)


def listing(directory: str) -> list[str]:
    """Names of what lies in a directory, sorted."""
    if not is_remote(directory):
        return sorted(os.listdir(local_path(directory)))
    from pyarrow import fs

    system, inner = file_system(directory)
    with _named(directory):
        found = system.get_file_info(fs.FileSelector(inner.rstrip("/")))
    return sorted(info.base_name for info in found)


def size_and_version(path: str) -> tuple[int, str]:
    """Bytes of a file, and a text that changes when the file does."""
    if not is_remote(path):
        info = os.stat(local_path(path))
        return info.st_size, f"{info.st_size}:{info.st_mtime_ns}"
    system, inner = file_system(path)
    with _named(path):
        found = system.get_file_info(inner)
    return found.size, f"{found.size}:{found.mtime_ns}"


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Name the path in what a remote file system raises."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be reached: {' '.join(str(error).split())}") from error
