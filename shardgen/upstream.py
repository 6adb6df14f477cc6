"""Upstream's hashes and compressions, without importing streaming."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from shardgen.errors import UserError


def _load(name: str) -> ModuleType:
    """A module of ``streaming.base`` that needs nothing else of streaming.

    Loaded from its file: importing the package takes 4 s and 0.7 GB per process, torch included.
    """
    full = f"streaming.base.{name}"
    if full in sys.modules:
        return sys.modules[full]
    package = importlib.util.find_spec("streaming")
    if package is None or not package.submodule_search_locations:
        raise UserError("mosaicml-streaming is not installed: pip install 'mosaicml-streaming==0.13.*'")
    path = os.path.join(package.submodule_search_locations[0], "base", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"shardgen._streaming_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_compression, _hashing = _load("compression"), _load("hashing")
compress, decompress, is_compression = (
    _compression.compress,
    _compression.decompress,
    _compression.is_compression,
)
get_compression_extension = _compression.get_compression_extension
get_hash, is_hash = _hashing.get_hash, _hashing.is_hash


def check_format(compression: str | None, hashes: Sequence[str]) -> None:
    """Refuse names that upstream does not know."""
    if compression is not None and not is_compression(compression):
        raise UserError(f"--compression {compression!r} is unknown: use zstd:3, gz, snappy, br or bz2")
    for name in hashes:
        if not is_hash(name):
            raise UserError(
                f"--hashes {name!r} is unknown: use xxh64, sha256, md5 or another of hashlib or xxhash"
            )
