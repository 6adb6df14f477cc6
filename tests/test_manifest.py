"""The manifest is whole or refused, and the fingerprint follows the data alone."""

import json

import numpy as np
import pytest
from build_support import data_files, make, table, token_rows, write_parquet

from shardgen.errors import UserError
from shardgen.manifest import Manifest, fingerprint

KEYS = {
    "format_version", "fingerprint", "boundaries", "tokens_column", "loss_mask_column", "columns", "options",
    "buckets", "num_samples", "num_tokens", "num_loss_tokens", "counts", "predicted", "sources", "versions",
}  # fmt: skip
OPTIONS = {
    "token_budget", "max_batch_size", "padding", "pad_to_multiple_of", "cost_budget", "quadratic_length",
    "overhead_tokens", "lookahead", "optimize_for_lookahead", "buckets", "max_length", "over_length",
    "on_empty", "on_null", "token_dtype", "shard_size", "compression", "hashes",
}  # fmt: skip


@pytest.fixture
def built(tmp_path):
    lengths = [*range(1, 41), 90]
    path = write_parquet(tmp_path / "in.parquet", table(token_rows(lengths)))
    make(path, tmp_path / "out", boundaries=(10, 50, 60), token_budget=100, shard_size=1000)
    return tmp_path / "out"


def test_what_it_says(built):
    obj = json.loads((built / "manifest.json").read_text())
    assert set(obj) == KEYS and set(obj["options"]) == OPTIONS
    assert obj["boundaries"] == [0, 10, 50, 60, 90]
    assert (obj["num_samples"], obj["num_tokens"], obj["num_loss_tokens"]) == (41, 910, 910)
    assert [(b["num_samples"], b["num_tokens"], b["directory"]) for b in obj["buckets"]] == [
        (10, 55, "bucket-00"),
        (30, 765, "bucket-01"),
        (0, 0, None),
        (1, 90, "bucket-03"),
    ]
    assert [b["batch_size"] for b in obj["buckets"]] == [10, 2, 1, 1]
    assert obj["sources"][0]["path"] == "in.parquet" and obj["sources"][0]["num_rows"] == 41
    assert set(obj["counts"]) == {
        "over_length_dropped",
        "truncated",
        "split",
        "skipped_empty",
        "skipped_null",
    }
    assert set(obj["predicted"]) == {"padding_efficiency", "lookahead_padding_efficiency"}
    assert "mosaicml-streaming" in obj["versions"]
    shards = [len(list((built / name).glob("shard.*"))) for name in ("bucket-00", "bucket-01", "bucket-03")]
    assert [b["num_shards"] for b in obj["buckets"]] == [shards[0], shards[1], 0, shards[2]]


def test_saved_and_loaded_it_is_the_same(built, tmp_path):
    manifest = Manifest.load(built)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert (tmp_path / "manifest.json").read_bytes() == (built / "manifest.json").read_bytes()


def test_a_directory_without_one_is_no_dataset(tmp_path):
    with pytest.raises(UserError, match=r"is not a dataset: no manifest.json"):
        Manifest.load(tmp_path)
    with pytest.raises(UserError, match=r"is not a dataset: no manifest.json"):
        Manifest.load(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda obj: obj.update(format_version=99), "format_version 99"),
        (lambda obj: obj.pop("fingerprint"), "lacks .*fingerprint"),
        (lambda obj: obj.update(surprise=1), "unknown keys .*surprise"),
        (lambda obj: obj["boundaries"].pop(), "4 buckets for 4 boundaries"),
        (lambda obj: obj.update(num_samples=3), "counts 3 samples but its buckets 41"),
        (lambda obj: obj["buckets"][0].pop("lower"), "lower"),
    ],
)
def test_a_damaged_one_is_refused(built, change, message):
    path = built / "manifest.json"
    obj = json.loads(path.read_text())
    change(obj)
    path.write_text(json.dumps(obj))
    with pytest.raises(UserError, match=message):
        Manifest.load(built)


@pytest.mark.parametrize("text", ["", "[]", "{", "not json"])
def test_one_that_is_no_json_object_is_refused(built, text):
    (built / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json"):
        Manifest.load(built)


def test_every_part_of_the_fingerprint_counts():
    shards = [("shard.00000.mds", 3, 100, "ab"), ("shard.00001.mds", 1, 50, "cd")]
    lengths, loss = np.array([1, 2, 3, 4]), np.array([1, 1, 1, 1])
    seen = {
        fingerprint(shards, lengths, loss),
        fingerprint(shards, lengths, None),
        fingerprint(shards, lengths[::-1], loss),
        fingerprint(shards, lengths, loss * 2),
        fingerprint(shards[::-1], lengths, loss),
        fingerprint(shards[:1], lengths, loss),
        *(fingerprint([("x", 3, 100, "ab"), shards[1]], lengths, loss) for _ in range(1)),
        fingerprint([("shard.00000.mds", 2, 100, "ab"), shards[1]], lengths, loss),
        fingerprint([("shard.00000.mds", 3, 101, "ab"), shards[1]], lengths, loss),
        fingerprint([("shard.00000.mds", 3, 100, "ac"), shards[1]], lengths, loss),
    }
    assert len(seen) == 10
    assert fingerprint(shards, lengths.astype(np.int32), loss) == fingerprint(shards, lengths, loss)


def test_it_follows_the_data_not_the_options(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", table(token_rows(range(1, 60))))
    first = make(path, tmp_path / "one", boundaries=(20, 60))
    second = make(
        path,
        tmp_path / "two",
        boundaries=(20, 60),
        token_budget=600,
        lookahead=8,
        max_batch_size=3,
        memory=1 << 20,
    )
    assert first.fingerprint == second.fingerprint
    assert data_files(tmp_path / "one") == data_files(tmp_path / "two")
    assert make(path, tmp_path / "three", boundaries=(21, 60)).fingerprint != first.fingerprint


def test_a_build_without_hashes_has_one_too(tmp_path):
    one = write_parquet(tmp_path / "one.parquet", table([[1, 2], [3]]))
    two = write_parquet(tmp_path / "two.parquet", table([[1, 2], [4]]))
    first, second = (make(p, tmp_path / f"{i}", hashes=()) for i, p in enumerate((one, two)))
    assert first.fingerprint != second.fingerprint
