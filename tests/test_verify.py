"""Damage of every kind is found and named; a sound build is not accused."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from build_support import error_line, make, run_cli, table, token_rows, write_parquet

from shardgen.errors import UserError
from shardgen.manifest import Manifest
from shardgen.upstream import get_hash
from shardgen.verify import verify

LENGTHS = np.random.default_rng(8).integers(1, 40, 120).tolist()
LENGTHS[50:60] = [17] * 10


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def source(tmp_path):
    rows = token_rows(LENGTHS)
    masks = [[t % 2 for t in row] for row in rows]
    whole = table(
        rows,
        mask=pa.array(masks, pa.list_(pa.uint8())),
        row=range(120),
        text=["x" * (i % 4) for i in range(120)],
    )
    write_parquet(tmp_path / "a.parquet", whole.slice(0, 70), 30)
    write_parquet(tmp_path / "b.parquet", whole.slice(70), 30)
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]


OPTIONS = {
    "boundaries": (10, 20, 40),
    "loss_mask_column": "mask",
    "columns": ("row", "text"),
    "shard_size": 1500,
}


@pytest.fixture(params=[None, "zstd:3"])
def built(tmp_path, source, request):
    make(source, tmp_path / "out", compression=request.param, **OPTIONS)
    return tmp_path / "out"


@pytest.fixture
def plain(tmp_path, source):
    """Columns without a row number, so that rows of one length have one size."""
    make(source, tmp_path / "out", boundaries=(10, 20, 40), shard_size=4000)
    return tmp_path / "out"


def test_a_sound_build(built, source):
    assert verify(str(built)).problems == []
    assert verify(str(built), source).problems == []


@pytest.mark.parametrize("policy", ["drop", "truncate", "split"])
def test_a_sound_build_under_every_policy(tmp_path, source, policy):
    whole = pq.read_table(source[0])
    tokens = [
        [] if i == 3 else None if i == 4 else row for i, row in enumerate(whole["input_ids"].to_pylist())
    ]
    path = write_parquet(tmp_path / "odd.parquet", table(tokens), 11)
    out = tmp_path / "out"
    make(path, out, max_length=15, over_length=policy, on_empty="skip", on_null="skip")
    assert verify(str(out), [path]).problems == []


def shard_files(built: Path) -> list[Path]:
    return sorted(built.glob("bucket-*/shard.*"))


def test_every_flipped_bit_is_found_in_its_shard(built):
    rng = np.random.default_rng(0)
    for shard in shard_files(built)[::3]:
        whole = shard.read_bytes()
        at = int(rng.integers(len(whole)))
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        shard.write_bytes(changed)
        problems = verify(str(built)).problems
        assert problems and {problem.path for problem in problems} == {str(shard.relative_to(built))}
        shard.write_bytes(whole)
    assert verify(str(built)).problems == []


def test_all_bad_shards_are_named(built):
    bad = shard_files(built)[1], shard_files(built)[-1], shard_files(built)[4]
    bad[0].write_bytes(bad[0].read_bytes()[:-1])
    bad[1].unlink()
    bad[2].write_bytes(b"")
    named = {problem.path for problem in verify(str(built)).problems}
    assert named == {str(path.relative_to(built)) for path in bad}


def rewrite(built: Path, shard: Path, data: bytes):
    """Replace a shard and make all hashes agree: only the source can tell."""
    shard.write_bytes(data)
    for index in (shard.parent / "index.json", built / "index.json"):
        content = json.loads(index.read_text())
        for entry in content["shards"]:
            if (index.parent / entry["raw_data"]["basename"]) == shard:
                entry["raw_data"]["hashes"] = {name: get_hash(name, data) for name in entry["hashes"]}
        index.write_text(json.dumps(content, sort_keys=True))
    from shardgen.manifest import fingerprint

    entries = json.loads((built / "index.json").read_text())["shards"]
    manifest = json.loads((built / "manifest.json").read_text())
    lengths = np.concatenate(
        [pq.read_table(p)["length"].to_numpy() for p in sorted(built.glob("bucket-*/samples.parquet"))]
    )
    contents = [
        (
            Path(e["raw_data"]["basename"]).name,
            e["samples"],
            e["raw_data"]["bytes"],
            e["raw_data"]["hashes"]["xxh64"],
        )
        for e in entries
    ]
    manifest["fingerprint"] = fingerprint(contents, lengths, None)
    (built / "manifest.json").write_text(json.dumps(manifest))


def samples_of(data: bytes) -> np.ndarray:
    """Byte offsets of a shard's samples and of its end."""
    count = int(np.frombuffer(data[:4], "<u4")[0])
    return np.frombuffer(data[4 : 8 + 4 * count], "<u4").astype(int)


def equal_pair(shard: Path) -> tuple[bytes, int, int, np.ndarray]:
    """Two neighbouring samples of equal size but other content."""
    data = shard.read_bytes()
    offsets = samples_of(data)
    sizes = np.diff(offsets)
    i = int(np.flatnonzero(sizes[1:] == sizes[:-1])[0])
    return data, i, i + 1, offsets


def source_rows(built: Path, shard: Path, *samples: int) -> list[str]:
    """``FILE row N`` of samples of a bucket's first shard."""
    stored = pq.read_table(shard.parent / "samples.parquet").to_pydict()
    return [f"{'ab'[stored['source_file'][i]]}.parquet row {stored['source_row'][i]}" for i in samples]


def test_two_swapped_rows_of_equal_length_are_found_by_their_hashes(plain):
    shard = plain / "bucket-01" / "shard.00000.mds"
    data, i, j, offsets = equal_pair(shard)
    a, b = data[offsets[i] : offsets[j]], data[offsets[j] : offsets[j + 1]]
    shard.write_bytes(data[: offsets[i]] + b + a + data[offsets[j + 1] :])
    assert [problem.path for problem in verify(str(plain)).problems] == ["bucket-01/shard.00000.mds"]


def test_two_swapped_rows_are_named_against_the_source_even_with_good_hashes(plain, source):
    shard = plain / "bucket-01" / "shard.00000.mds"
    data, i, j, offsets = equal_pair(shard)
    a, b = data[offsets[i] : offsets[j]], data[offsets[j] : offsets[j + 1]]
    rewrite(plain, shard, data[: offsets[i]] + b + a + data[offsets[j + 1] :])
    assert verify(str(plain)).problems == []  # nothing inside the build is at odds
    problems = verify(str(plain), source).problems
    first, second = source_rows(plain, shard, i, j)
    assert [problem.path for problem in problems] == ["bucket-01/shard.00000.mds"] * 2
    assert f"sample {i} (id " in problems[0].text and problems[0].text.endswith(second)
    assert first in problems[0].text and problems[1].text.endswith(first)


def test_one_repeated_row_is_named_against_the_source_even_with_good_hashes(plain, source):
    shard = plain / "bucket-01" / "shard.00000.mds"
    data, i, j, offsets = equal_pair(shard)
    a = data[offsets[i] : offsets[j]]
    rewrite(plain, shard, data[: offsets[j]] + a + data[offsets[j + 1] :])
    (problem,) = verify(str(plain), source).problems
    first, second = source_rows(plain, shard, i, j)
    assert (problem.path, f"sample {j} " in problem.text) == ("bucket-01/shard.00000.mds", True)
    assert f"is not {source[0].rpartition('/')[0]}/{second}" in problem.text and problem.text.endswith(first)


def change_samples(built: Path, change):
    path = built / "bucket-01" / "samples.parquet"
    stored = pq.read_table(path).to_pydict()
    change(stored)
    pq.write_table(pa.table(stored, schema=pq.read_schema(path)), path)


def repeat(stored):
    stored["source_row"][5] = stored["source_row"][4]
    stored["source_file"][5] = stored["source_file"][4]


def swap(stored):
    stored["source_row"][4], stored["source_row"][5] = stored["source_row"][5], stored["source_row"][4]


def wrong_length(stored):
    stored["length"][3] = 11 if stored["length"][3] != 11 else 12


def outside(stored):
    stored["length"][3] = 39


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repeat, "sample 5 .* repeats or precedes"),
        (swap, "repeats or precedes"),
        (wrong_length, "tokens, samples.parquet says"),
        (outside, r"sample 3 has length 39, outside 11\.\.20"),
        (lambda stored: [column.pop() for column in stored.values()], "rows, the manifest counts"),
    ],
)
def test_damage_to_samples_parquet(plain, change, message):
    change_samples(plain, change)
    text = "\n".join(map(str, verify(str(plain)).problems))
    assert re.search(message, text), text


def test_a_row_in_two_buckets_is_found(plain):
    other = pq.read_table(plain / "bucket-02" / "samples.parquet").to_pydict()

    def steal(stored):
        last = len(stored["source_row"]) - 1
        stored["source_file"][last], stored["source_row"][last] = (
            other["source_file"][-1],
            other["source_row"][-1],
        )

    change_samples(plain, steal)
    assert any("is there twice" in problem.text for problem in verify(str(plain)).problems)


def test_loss_tokens_are_checked_against_the_mask(built, source):
    change_samples(built, lambda stored: stored["loss_tokens"].__setitem__(2, stored["loss_tokens"][2] + 1))
    assert any("fingerprint" in problem.text for problem in verify(str(built)).problems)
    assert any(
        "another number of loss tokens" in problem.text for problem in verify(str(built), source).problems
    )


def test_first_token_loss_is_checked_against_the_mask(built, source):
    change_samples(
        built, lambda stored: stored["first_token_loss"].__setitem__(2, not stored["first_token_loss"][2])
    )
    assert any("another first_token_loss" in problem.text for problem in verify(str(built), source).problems)


def test_other_files_are_checked_too(plain):
    content = json.loads((plain / "index.json").read_text())
    content["shards"].reverse()
    (plain / "index.json").write_text(json.dumps(content))
    assert [problem.path for problem in verify(str(plain)).problems] == ["index.json"]
    (plain / "bucket-00" / "samples.parquet").unlink()
    (plain / "bucket-01" / "index.json").write_text("{")
    named = {problem.path for problem in verify(str(plain)).problems}
    assert {"bucket-00/samples.parquet", "bucket-01/index.json"} <= named


def test_a_changed_fingerprint_is_found(plain):
    manifest = json.loads((plain / "manifest.json").read_text())
    manifest["fingerprint"] = hashlib.sha256(b"other").hexdigest()
    (plain / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = verify(str(plain)).problems
    assert problem.path == "manifest.json" and "fingerprint" in problem.text


def test_another_source_is_told_apart(plain, source):
    with pytest.raises(UserError, match=r"name the same inputs in the same order"):
        verify(str(plain), source[::-1])
    whole = pq.read_table(source[0])
    rows = whole["input_ids"].to_pylist()
    rows[7], rows[60] = rows[60], rows[7]
    write_parquet(Path(source[0]), whole.set_column(0, "input_ids", pa.array(rows, pa.list_(pa.int32()))), 30)
    problems = verify(str(plain), source).problems
    assert problems


def test_the_command(plain, source):
    sound = run_cli("verify", plain, "--source", source[0], source[1], "--json")
    assert sound.returncode == 0, sound.stderr
    report = json.loads(sound.stdout.splitlines()[-1])
    assert report["ok"] and report["num_samples"] == 120 and report["compared_with_source"]
    assert report["fingerprint"] == Manifest.load(plain).fingerprint
    shards = shard_files(plain)
    for shard in shards[:2]:
        shard.write_bytes(shard.read_bytes()[:-3])
    bad = run_cli("verify", plain, "--json")
    assert bad.returncode == 1
    report = json.loads(bad.stdout.splitlines()[-1])
    assert [problem["path"] for problem in report["problems"]] == [
        str(s.relative_to(plain)) for s in shards[:2]
    ]
    lines = bad.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["bad", "bad", "error"]
    assert all(str(shard.relative_to(plain)) in line for shard, line in zip(shards[:2], lines, strict=False))
    (plain / "manifest.json").unlink()
    assert "is not a dataset: no manifest.json" in error_line(run_cli("verify", plain))
