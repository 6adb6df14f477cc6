"""Keyed hashes: fixed values, no ties, independent uses."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loader.keys import COPY_SHIFT, Purpose, derive_key, hash_ids, pick

_MASK = (1 << 64) - 1
KNOWN = (
    1582350754072042859,
    13891284638129058948,
    [5774990476628347352, 3342073759929009087, 6033714035422176312],
)


def splitmix_finaliser(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, (1 << COPY_SHIFT) - 1), min_size=1, max_size=50), st.integers(0, _MASK))
def test_hash_is_the_published_finaliser(ids, key):
    expected = [splitmix_finaliser((i + key) & _MASK) for i in ids]
    assert hash_ids(np.array(ids), key).tolist() == expected


def test_copies_are_other_identities():
    ids, copies = np.array([7, 7, 7]), np.array([0, 1, 2])
    hashes = hash_ids(ids, 1, copies)
    assert len(set(hashes.tolist())) == 3
    assert hashes[0] == hash_ids(ids[:1], 1)[0]


def test_no_ties_in_a_million_ids():
    hashes = hash_ids(np.arange(1_000_000), derive_key(3, Purpose.ROW, 2))
    assert len(np.unique(hashes)) == 1_000_000


def test_known_keys():
    # Fixed for ever: a change would reorder every epoch of every run in progress.
    assert derive_key(0, Purpose.ROW, 0) == KNOWN[0]
    assert derive_key(17, Purpose.STEP, 3) == KNOWN[1]
    assert hash_ids(np.arange(3), derive_key(17, Purpose.ROW, 1)).tolist() == KNOWN[2]


def test_uses_of_a_seed_do_not_cancel():
    keys = {derive_key(s, p, e) for s in range(20) for p in Purpose for e in range(20)}
    assert len(keys) == 20 * len(Purpose) * 20


@given(st.integers(1, 1000))
def test_pick_covers_all_choices_evenly(num_choices):
    chosen = pick(hash_ids(np.arange(20_000), 5), num_choices)
    assert chosen.min() >= 0 and chosen.max() < num_choices
    counts = np.bincount(chosen, minlength=num_choices)
    expected = 20_000 / num_choices
    assert np.abs(counts - expected).max() <= 6 * np.sqrt(expected) + 1
