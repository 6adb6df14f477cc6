"""The reader against upstream's writer and decoder, and against damage."""

import json
import os
import pickle
import struct
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import MDSWriter
from streaming.base.format.mds.encodings import mds_decode, mds_encode
from streaming.base.format.mds.reader import MDSReader

from loader.mds import array_encoding, column_span, decode_array, decode_value, vector_span
from loader.shards import SampleReader, ShardInfo, ShardNotFound
from shardgen.errors import UserError

NUMBERS = [
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
]


def write(folder, columns, samples, **kwargs):
    with MDSWriter(out=str(folder), columns=columns, **kwargs) as out:
        for sample in samples:
            out.write(sample)
    return open_set(folder)


def open_set(folder):
    index = json.loads((Path(folder) / "index.json").read_text())
    shards = ShardInfo.from_index(index)
    return SampleReader(shards, lambda n: os.path.join(folder, shards[n].basename), decode=mds_decode)


def oracle(folder):
    """Every sample as upstream decodes it, read one after another."""
    index = json.loads((Path(folder) / "index.json").read_text())
    for entry in index["shards"]:
        reader = MDSReader.from_json(str(folder), "", entry)
        for row in range(entry["samples"]):
            yield reader.decode_sample(reader.get_sample_data(row))


def equal(got, expected):
    if isinstance(expected, np.ndarray):
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, np.generic):
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()
    else:
        assert type(got) is type(expected)
        assert got == expected


def array(rng, dtype, shape):
    raw = rng.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


COLUMNS = {
    **{f"scalar_{name}": name for name in NUMBERS},
    **{f"array_{name}": f"ndarray:{name}" for name in NUMBERS},
    "any_dtype": "ndarray",
    "fixed": "ndarray:int16:3,2",
    "fixed_row": "ndarray:float32:4",
    "bytes": "bytes",
    "int": "int",
    "json": "json",
    "str": "str",
    "str_int": "str_int",
    "str_float": "str_float",
    "str_decimal": "str_decimal",
    "pickled": "pkl",
}


def random_sample(rng, length):
    text = "".join(chr(c) for c in rng.integers(32, 0x2FF, length % 7))
    return {
        **{
            f"scalar_{name}": array(rng, name, (1,))[0]
            if "float" not in name
            else np.dtype(name).type(rng.normal())
            for name in NUMBERS
        },
        **{f"array_{name}": array(rng, name, (length,)) for name in NUMBERS},
        "any_dtype": array(rng, NUMBERS[length % len(NUMBERS)], (length, 1 + length % 3)),
        "fixed": array(rng, "int16", (3, 2)),
        "fixed_row": array(rng, "float32", (4,)),
        "bytes": bytes(rng.integers(0, 256, length % 5, dtype=np.uint8)),
        "int": int(rng.integers(-(1 << 63), 1 << 63)),
        "json": {"length": length, "text": text, "list": [None, 1.5]},
        "str": text,
        "str_int": int(rng.integers(1 << 62)) ** 3,
        "str_float": float(rng.normal()),
        "str_decimal": Decimal(length) / 7,
        "pickled": {length},
    }


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    rng = np.random.default_rng(3)
    # both sides of the limits where the stored shape grows by a byte or three
    lengths = [1, 2, 3, 255, 256, 257, 300, 11, 7, 65535, 65536, 5, 1, 1000, 64]
    samples = [random_sample(rng, length) for length in lengths]
    reader = write(folder, COLUMNS, samples, size_limit=60_000)
    assert len(reader.shards) > 3
    return folder, reader, lengths


def test_every_encoding_equals_upstreams(everything):
    folder, reader, lengths = everything
    expected = list(oracle(folder))
    ids = np.arange(len(lengths))
    for sample, want in zip(ids.tolist(), expected, strict=True):
        got = reader.sample(sample)
        assert list(got) == list(want)
        for name in want:
            equal(got[name], want[name])
    rng = np.random.default_rng(0)
    for name in COLUMNS:
        chosen = rng.integers(0, len(lengths), 40)  # any order, with repeats
        for got, sample in zip(reader.values(chosen, name), chosen.tolist(), strict=True):
            equal(got, expected[sample][name])


@pytest.mark.parametrize("dtype", NUMBERS)
def test_vectors_are_the_stored_values(everything, dtype):
    folder, reader, lengths = everything
    expected = [sample[f"array_{dtype}"] for sample in oracle(folder)]
    ids = np.random.default_rng(1).permutation(len(lengths))
    before = reader.bytes_read
    found = reader.vectors(ids, f"array_{dtype}")
    assert found.dtype == np.dtype(dtype)
    assert found.lengths == [lengths[i] for i in ids]
    for part, sample in zip(found.parts, ids.tolist(), strict=True):
        assert bytes(part) == expected[sample].tobytes()
    assert reader.bytes_read - before == sum(expected[i].nbytes for i in ids)


@pytest.mark.parametrize("dtype", [*NUMBERS, "int"])
def test_scalars_are_stacked(everything, dtype):
    folder, reader, lengths = everything
    name = "int" if dtype == "int" else f"scalar_{dtype}"
    expected = [sample[name] for sample in oracle(folder)]
    got = reader.scalars(np.arange(len(lengths))[::-1], name)
    assert got.dtype == np.dtype("int64" if dtype == "int" else dtype)
    assert got.tobytes() == np.array(expected[::-1], got.dtype).tobytes()


def test_vectors_of_a_dtype_stored_with_each_value(tmp_path):
    samples = [{"x": np.array([1, 2], np.uint8)}, {"x": np.array([70000], np.int32)}]
    reader = write(tmp_path / "ints", {"x": "ndarray"}, samples)
    found = reader.vectors(np.array([1, 0]), "x")
    assert (found.dtype, found.lengths) == (np.dtype("int32"), [1, 2])
    values = [np.frombuffer(part, "<i4").tolist() for part in found.parts]
    assert values == [[70000], [1, 2]]
    samples[1] = {"x": np.array([0.5], np.float32)}
    reader = write(tmp_path / "mixed", {"x": "ndarray"}, samples)
    assert reader.vectors(np.array([1]), "x").dtype == np.float32
    with pytest.raises(UserError, match="'x' mixes float32, uint8 in one batch"):
        reader.vectors(np.array([0, 1]), "x")


def test_vectors_of_a_fixed_shape(tmp_path):
    rows = [array(np.random.default_rng(i), "uint16", (5,)) for i in range(3)]
    reader = write(tmp_path, {"x": "ndarray:uint16:5", "y": "str"}, [{"x": row, "y": "é"} for row in rows])
    found = reader.vectors(np.array([2, 0]), "x")
    assert [bytes(part) for part in found.parts] == [rows[2].tobytes(), rows[0].tobytes()]
    assert found.lengths == [5, 5]


def test_vectors_need_one_axis(everything):
    _, reader, _ = everything
    with pytest.raises(UserError, match=r"sample 1 .*column 'any_dtype' has shape \(2, 3\), one axis"):
        reader.vectors(np.array([1]), "any_dtype")
    with pytest.raises(UserError, match="'str' is stored as 'str', not as an ndarray"):
        reader.vectors(np.array([1]), "str")
    with pytest.raises(UserError, match="'json' is stored as 'json', not as a number of fixed size"):
        reader.scalars(np.array([1]), "json")
    with pytest.raises(UserError, match="no column 'tokens': the shards store any_dtype, "):
        reader.vectors(np.array([1]), "tokens")


def test_compressed_shards_are_read_after_decompression(tmp_path):
    samples = [{"x": np.arange(i + 1, dtype=np.int32)} for i in range(50)]
    with MDSWriter(
        out=str(tmp_path), columns={"x": "ndarray:int32"}, compression="zstd:3", hashes=["xxh64"]
    ) as out:
        for sample in samples:
            out.write(sample)
    from streaming.base.compression import decompress

    zipped = next(tmp_path.glob("*.mds.zstd"))
    zipped.with_suffix("").write_bytes(decompress("zstd:3", zipped.read_bytes()))
    reader = open_set(tmp_path)
    found = reader.vectors(np.arange(50), "x")
    assert [bytes(part) for part in found.parts] == [sample["x"].tobytes() for sample in samples]


# ---------------------------------------------------------------- properties of the byte arithmetic


@st.composite
def shard_of_columns(draw):
    """A few columns, fixed and varying, and encoded samples of them."""
    sizes = draw(st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=4))
    rows = draw(st.lists(st.lists(st.binary(max_size=12), min_size=len(sizes), max_size=len(sizes))))
    samples = [
        [
            value if size is None else value.ljust(size, b"x")[:size]
            for value, size in zip(row, sizes, strict=True)
        ]
        for row in rows
    ]
    return sizes, samples


@given(shard_of_columns(), st.integers(0, 20))
def test_column_span_finds_every_value(drawn, before):
    sizes, samples = drawn
    encoded = [
        b"".join(struct.pack("<I", len(v)) for v, size in zip(row, sizes, strict=True) if size is None)
        + b"".join(row)
        for row in samples
    ]
    offsets = before + np.cumsum([0, *map(len, encoded)])
    data = np.frombuffer(bytes(before) + b"".join(encoded) + b"\0", np.uint8)
    for column in range(len(sizes)):
        starts, lengths, good = column_span(data, offsets, sizes, column)
        assert good.all()
        found = [data[a : a + n].tobytes() for a, n in zip(starts, lengths, strict=True)]
        assert found == [row[column] for row in samples]


@given(st.binary(min_size=1, max_size=60), st.data())
def test_column_span_never_calls_wrong_sizes_good(raw, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), min_size=2, max_size=6)))
    sizes = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=1, max_size=3))
    number = data.draw(st.integers(0, len(sizes) - 1))
    starts, lengths, good = column_span(np.frombuffer(raw, np.uint8), np.array(cuts), sizes, number)
    for row, (low, high) in enumerate(pairwise(cuts)):
        # brute force: walk the sample
        word, at, spans = low, low + 4 * sizes.count(None), []
        for size in sizes:
            if size is None:
                size = int.from_bytes(raw[word : word + 4].ljust(4, b"\xff"), "little")
                word += 4
            spans.append((at, size))
            at += size
        if low + 4 * sizes.count(None) <= high:
            assert good[row] == (at == high)
        if good[row]:
            assert at == high
            assert (starts[row], lengths[row]) == spans[number]
            assert low <= starts[row] <= starts[row] + lengths[row] <= high


@given(st.data())
def test_vector_span_agrees_with_decoding(data):
    """On real arrays, and on headers with a byte changed: good exactly where decoding gives one axis."""
    dtype = data.draw(st.sampled_from(NUMBERS))
    encoding = array_encoding(f"ndarray:{dtype}")
    values = []
    for length in data.draw(
        st.lists(st.sampled_from([1, 2, 3, 255, 256, 257, 65536]), min_size=1, max_size=4)
    ):
        value = bytearray(mds_encode(f"ndarray:{dtype}", (np.arange(length) % 251).astype(dtype)))
        if data.draw(st.booleans()):
            value[data.draw(st.integers(0, min(4, len(value) - 1)))] ^= data.draw(st.integers(1, 255))
        values.append(bytes(value))
    lengths = np.array([len(value) for value in values])
    starts = np.cumsum(lengths) - lengths
    raw = np.frombuffer(b"".join(values), np.uint8)
    first, fits, num_bytes = vector_span(raw, starts, lengths, np.ones(len(values), bool), encoding)
    for row, value in enumerate(values):
        try:
            decoded = decode_array(encoding, value)
        except ValueError:
            decoded = None
        assert bool(fits[row]) == (decoded is not None and decoded.ndim == 1)
        if fits[row]:
            assert raw[first[row] : first[row] + num_bytes[row]].tobytes() == decoded.tobytes()


def test_a_count_that_overflows_does_not_fit():
    # uint64 shape of 2**61 + 1 values of 8 bytes: the product wraps around to the 8 bytes that are there
    value = bytes([(1 << 2) | 3]) + struct.pack("<Q", (1 << 61) + 1) + bytes(8)
    raw = np.frombuffer(value, np.uint8)
    encoding = array_encoding("ndarray:int64")
    _, fits, _ = vector_span(raw, np.array([0]), np.array([len(raw)]), np.array([True]), encoding)
    assert not fits[0]
    with pytest.raises(ValueError, match="needs 18446744073709551624 bytes"):
        decode_array(encoding, value)


@given(
    st.sampled_from(["ndarray", *(f"ndarray:{d}" for d in NUMBERS), "ndarray:int16:2,3", *NUMBERS, "int"]),
    st.binary(max_size=40),
)
@settings(max_examples=300)
def test_damaged_values_raise_or_agree_with_upstream(encoding, data):
    try:
        got = decode_value(encoding, data, None)
    except ValueError:
        return
    equal(got, mds_decode(encoding, data))


# ---------------------------------------------------------------- the reader as an object


def small_set(folder, count=40, limit=900):
    samples = [{"n": i, "x": np.arange(i % 9 + 1, dtype=np.uint16) + i} for i in range(count)]
    return write(folder, {"n": "int", "x": "ndarray:uint16"}, samples, size_limit=limit), samples


def test_shard_of_counts_samples_and_skips_empty_shards(tmp_path):
    reader, _ = small_set(tmp_path)
    sizes = [shard.num_samples for shard in reader.shards]
    expected = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    assert len(set(expected)) > 1
    assert reader.shard_of(np.arange(40)).tolist() == expected
    info = reader.shards[0]
    counts = [0, 2, 0, 0, 1, 0]
    shards = [
        ShardInfo(basename=str(k), num_samples=n, raw_bytes=1, columns=info.columns)
        for k, n in enumerate(counts)
    ]
    assert SampleReader(shards, str).shard_of([0, 1, 2]).tolist() == [1, 1, 4]
    for wrong in (-1, 40):
        with pytest.raises(UserError, match=f"sample {wrong} is outside the 40 samples"):
            reader.vectors(np.array([0, wrong]), "x")


def test_an_empty_first_shard_can_be_opened(tmp_path):
    # upstream writes one when the very first sample is over the limit
    reader = write(
        tmp_path, {"x": "ndarray:uint16"}, [{"x": np.arange(5000, dtype=np.uint16)}], size_limit=600
    )
    assert [shard.num_samples for shard in reader.shards] == [0, 1]
    reader.open(0)
    assert reader.vectors(np.array([0]), "x").lengths == [5000]


def test_maps_come_on_first_use_and_go_when_dropped(tmp_path):
    reader, samples = small_set(tmp_path)
    asked = []
    locate = reader._locate
    reader._locate = lambda number: asked.append(number) or locate(number)
    assert reader.resident() == 0
    part = reader.vectors(np.array([0, 39]), "x").parts[0]
    last = int(reader.shard_of([39])[0])
    assert (reader.resident(), reader.open_shards(), asked) == (2, [0, last], [0, last])
    os.unlink(locate(0))
    reader.drop(0)
    assert reader.resident() == 1
    assert bytes(part) == samples[0]["x"].tobytes()  # what was handed out outlives its map and its file
    with pytest.raises(
        ShardNotFound, match=rf"^shard shard.00000.mds: there is no {tmp_path}/shard.00000.mds"
    ):
        reader.vectors(np.array([0]), "x")
    assert issubclass(ShardNotFound, UserError)
    assert issubclass(ShardNotFound, FileNotFoundError)
    reader.close()
    assert reader.resident() == 0
    assert reader.values(np.array([39]), "n") == [39]
    assert asked == [0, last, 0, last]


def test_no_map_of_a_dropped_shard_stays_behind(tmp_path):
    reader, _ = small_set(tmp_path)
    ids = np.arange(40)

    def mapped():
        maps = Path("/proc/self/maps").read_text()
        return sum(f"{tmp_path}/" in line for line in maps.splitlines())

    for column in ("x", "n"):
        reader.values(ids, column)
    reader.vectors(ids, "x")
    assert mapped() == len(reader.shards)
    for shard in range(len(reader.shards)):
        reader.drop(shard)
    assert mapped() == 0


def test_files_are_bounded_where_each_map_keeps_one_open(tmp_path):
    reader, samples = small_set(tmp_path)
    reader._most_maps = 2
    got = reader.vectors(np.arange(40), "x")
    assert [bytes(p) for p in got.parts] == [s["x"].tobytes() for s in samples]
    assert reader.resident() == 2


class Here:
    """A picklable `locate`."""

    def __init__(self, folder, shards):
        self.paths = [os.path.join(folder, shard.basename) for shard in shards]

    def __call__(self, number):
        return self.paths[number]


def test_a_pickled_copy_starts_without_maps(tmp_path):
    reader, samples = small_set(tmp_path)
    reader = SampleReader(reader.shards, Here(tmp_path, reader.shards))
    reader.vectors(np.arange(40), "x")
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.resident(), copy.bytes_read) == (0, 0)
    assert copy.values(np.array([7]), "x")[0].tolist() == samples[7]["x"].tolist()


def test_a_forked_child_reads_what_its_parent_mapped(tmp_path):
    reader, samples = small_set(tmp_path)
    reader.open(0)
    child = os.fork()
    if child == 0:
        good = all(reader.sample(i)["x"].tolist() == samples[i]["x"].tolist() for i in range(40))
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert reader.sample(39)["n"] == 39


# ---------------------------------------------------------------- damage


@pytest.fixture
def damaged(tmp_path):
    """A one-shard set of 30 samples, and a function that rewrites its file and reads sample 12."""
    reader, samples = small_set(tmp_path, count=30, limit=None)
    path = tmp_path / reader.shards[0].basename
    good = path.read_bytes()
    offsets = np.frombuffer(good, "<u4", 31, 4).tolist()

    def read(change, sample=12):
        raw = bytearray(good)
        changed = change(raw, offsets)
        path.write_bytes(raw if changed is None else changed)
        return open_set(tmp_path).vectors(np.array([sample]), "x")

    return read, offsets, samples


def test_truncated_anywhere_names_the_first_sample_in_doubt(damaged):
    read, offsets, _ = damaged
    for sample in (0, 17, 29):
        for length in (offsets[sample], offsets[sample + 1] - 1):
            with pytest.raises(UserError) as caught:
                read(lambda raw, _, length=length: raw[:length])
            span = f"sample {sample} at bytes {offsets[sample]}:{offsets[sample + 1]} is the first in doubt"
            assert span in str(caught.value)
            assert str(caught.value).startswith(f"shard shard.00000.mds: has {length} bytes")
    with pytest.raises(UserError, match=r"bytes 20:.* are missing, among them the offsets of its 30 samples"):
        read(lambda raw, _: raw[:20])
    with pytest.raises(UserError, match="is empty: delete the local copy"):
        read(lambda raw, _: b"")


def test_longer_than_the_index_says(damaged):
    read, offsets, _ = damaged
    with pytest.raises(UserError, match=f"has {offsets[-1] + 3} bytes, its offsets end at {offsets[-1]}"):
        read(lambda raw, _: raw + b"abc")


def test_another_shard(damaged):
    read, _, _ = damaged
    with pytest.raises(UserError, match="bytes 0:4 say 31 samples, the index says 30"):
        read(lambda raw, _: struct.pack("<I", 31) + raw[4:])


def test_offsets_that_do_not_ascend(damaged):
    read, offsets, _ = damaged

    def swap(raw, _):
        raw[4 + 4 * 8 : 4 + 4 * 9] = struct.pack("<I", offsets[7])

    with pytest.raises(UserError, match=f"sample 7 would be bytes {offsets[7]}:{offsets[7]}, bytes 32:40 of"):
        read(swap)

    def low(raw, _):
        raw[4:8] = struct.pack("<I", 3)

    with pytest.raises(UserError, match="sample 0 would be bytes 3:"):
        read(low)


@pytest.mark.parametrize("change", [(b"uint16", b"uint32"), (b'"mds"', b'"mds}')])
def test_columns_that_are_not_the_indexs(damaged, change):
    read, _, _ = damaged
    with pytest.raises(UserError, match=r"shard.00000.mds: bytes 128:\d+ (say|do not describe)"):
        read(lambda raw, _: raw.replace(*change))


def test_a_sample_that_disagrees_with_its_offsets(damaged):
    """The sample is named, and the others of its shard are still read."""
    read, offsets, samples = damaged

    def size(raw, offsets):
        raw[offsets[12]] ^= 4

    def count(raw, offsets):
        raw[offsets[12] + 4 + 8 + 1] ^= 1

    def axes(raw, offsets):
        raw[offsets[12] + 4 + 8] ^= 8

    where = f"shard shard.00000.mds, sample 12 (row 12) at bytes {offsets[12]}:{offsets[13]}"
    for change, what in (
        (size, "but its columns take"),
        (count, "needs"),
        (axes, "axes is cut off|needs|shape"),
    ):
        with pytest.raises(UserError, match=what) as caught:
            read(change)
        assert str(caught.value).startswith(where)
        assert bytes(read(change, 11).parts[0]) == samples[11]["x"].tobytes()


def test_a_file_that_cannot_be_read(tmp_path):
    reader, _ = small_set(tmp_path)
    path = tmp_path / reader.shards[0].basename
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"shard shard.00000.mds: cannot read .*: Is a directory"):
        reader.open(0)


def test_values_that_are_not_what_the_column_says(tmp_path):
    reader = write(tmp_path, {"s": "str", "j": "json"}, [{"s": b"ok", "j": b"{}"}, {"s": b"\xff", "j": b"{"}])
    assert reader.values(np.array([0]), "s") == ["ok"]
    for column in ("s", "j"):
        with pytest.raises(
            UserError, match=rf"sample 1 .*column '{column}' .* at bytes \d+:\d+ cannot be read"
        ):
            reader.values(np.array([0, 1]), column)


def test_an_encoding_nobody_reads(tmp_path):
    reader = write(tmp_path, {"p": "pkl"}, [{"p": 1}])
    assert reader.sample(0) == {"p": 1}
    alone = SampleReader(reader.shards, reader._locate)
    with pytest.raises(UserError, match=r"sample 0 .*nothing reads the encoding 'pkl'"):
        alone.sample(0)


def test_an_index_of_something_else():
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        ShardInfo.from_index({"version": 2})
    with pytest.raises(UserError, match="shard format 'json' version 2: only mds version 2 is read"):
        ShardInfo.from_index({"shards": [{"format": "json", "version": 2}]})


def test_shards_with_different_columns_are_refused(tmp_path):
    one = write(tmp_path / "a", {"x": "int"}, [{"x": 1}])
    two = write(tmp_path / "b", {"x": "str"}, [{"x": "1"}])
    with pytest.raises(UserError, match="have different columns"):
        SampleReader(one.shards + two.shards, str)
