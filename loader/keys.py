"""Keyed 64-bit hashes: the only source of randomness in a plan.

An order made by hashing identities depends on no library's random stream, on no worker count and on
no platform. For a fixed key the hash is a bijection of the identity, so two entries never tie.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_U64 = np.uint64
_MASK = (1 << 64) - 1
# An entry is hashed as (copy << COPY_SHIFT) | sample id.
COPY_SHIFT = 48


class Purpose(IntEnum):
    """What a key is used for; different purposes of one seed are independent."""

    ROW = 1
    SHARD = 2
    WEIGHT = 3
    STEP = 4
    RANK = 5
    BATCH = 6
    DIGEST = 7


def _mix_int(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_key(seed: int, purpose: Purpose, epoch: int = 0) -> int:
    """64-bit key of a use of a seed; each part is mixed before the next is added, so none cancel."""
    key = _mix_int(seed + 0x9E3779B97F4A7C15)
    key = _mix_int(key ^ (int(purpose) + 0xD1B54A32D192ED03))
    return _mix_int(key ^ (epoch + 0x8CB92BA72F3D8DD7))


def hash_ids(
    ids: NDArray[np.integer[Any]], key: int, copies: NDArray[np.integer[Any]] | None = None
) -> NDArray[np.uint64]:
    """Hash of every identity, uint64, shape (N,).

    The finaliser is that of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), Stafford's variant 13.

    Args:
        ids: Non-negative identities below 2^48, shape (N,).
        key: From :func:`derive_key`.
        copies: Copy number of each, below 2^16, shape (N,); ``None`` for all 0.
    """
    x = ids.astype(_U64)
    if copies is not None:
        x |= copies.astype(_U64) << _U64(COPY_SHIFT)
    x += _U64(key)
    x ^= x >> _U64(30)
    x *= _U64(0xBF58476D1CE4E5B9)
    x ^= x >> _U64(27)
    x *= _U64(0x94D049BB133111EB)
    x ^= x >> _U64(31)
    return x


def pick(hashes: NDArray[np.uint64], num_choices: NDArray[np.integer[Any]] | int) -> NDArray[np.int64]:
    """Evenly distributed choice in ``0..num_choices - 1`` from the top bits of each hash.

    Args:
        hashes: uint64, shape (N,).
        num_choices: Below 2^31, broadcast against ``hashes``.
    """
    return (((hashes >> _U64(32)) * np.asarray(num_choices, _U64)) >> _U64(32)).astype(np.int64)
