"""Every kind of source and of Arrow typing gives the same rows, and bad ones are named."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from build_support import (
    data_files,
    ipc_file,
    ipc_stream,
    json_lines,
    make,
    read_back,
    sample_table,
    saved_dataset,
    table,
    token_rows,
    write_parquet,
)
from hypothesis import given
from hypothesis import strategies as st

from shardgen.columns import lists_of, text_of
from shardgen.errors import UserError
from shardgen.sources import expand, open_sources, read_lengths

LENGTHS = [3, 1, 7, 2, 9, 4, 4, 12, 1, 5, 8, 6]
ROWS = token_rows(LENGTHS)
MASK = [[i % 2 for i in range(n)] for n in LENGTHS]
OPTIONS = {"boundaries": (4, 8, 12), "loss_mask_column": "mask", "columns": ("row", "text")}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """These tests cut no power, and hundreds of small files take seconds to reach the disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def typed(tokens, mask, chunks=None, rows=ROWS, masks=MASK) -> pa.Table:
    """The rows of this module with the given Arrow types, cut into chunks of the given sizes."""
    item = bool if mask.value_type == pa.bool_() else int
    columns = {
        "input_ids": pa.array(rows, tokens),
        "mask": pa.array([[item(v) for v in row] for row in masks], mask),
        "row": pa.array(range(len(rows)), pa.int64()),
        "text": pa.array([f"row {i}" * (i % 3) for i in range(len(rows))]),
    }
    whole = pa.table(columns)
    if chunks is None:
        return whole
    edges = np.cumsum([0, *chunks])
    return pa.concat_tables([whole.slice(a, b - a) for a, b in itertools.pairwise(edges)])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The build that all others must equal."""
    path = tmp_path_factory.mktemp("reference")
    source = write_parquet(path / "in.parquet", typed(pa.list_(pa.int32()), pa.list_(pa.uint8())))
    make(source, path / "out", **OPTIONS)
    return data_files(path / "out")


def records(rows=ROWS):
    whole = typed(pa.list_(pa.int64()), pa.list_(pa.int64()), rows=rows, masks=MASK[: len(rows)])
    return whole.to_pylist()


INT32, UINT32, INT64 = pa.int32(), pa.uint32(), pa.int64()


@pytest.mark.parametrize(
    ("tokens", "mask", "chunks"),
    [
        (pa.list_(INT64), pa.list_(pa.bool_()), [5, 7]),
        (pa.large_list(UINT32), pa.large_list(pa.int8()), [1] * 12),
        (pa.list_view(INT32), pa.list_view(INT64), [2, 10]),
        (pa.large_list_view(INT64), pa.list_(UINT32), None),
        (pa.list_(pa.uint16()), pa.list_(pa.uint64()), [12]),
    ],
)
@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_typing_and_chunking_do_not_show_in_the_output(tmp_path, reference, tokens, mask, chunks, kind):
    source = typed(tokens, mask, chunks)
    path = (ipc_file if kind == "arrow" else ipc_stream)(tmp_path / "in.arrow", source)
    make(path, tmp_path / "out", **OPTIONS)
    assert data_files(tmp_path / "out") == reference


@pytest.mark.parametrize("tokens", [pa.list_(INT64), pa.large_list(UINT32), pa.list_(pa.uint64())])
def test_parquet_types_and_row_groups_do_not_show_in_the_output(tmp_path, reference, tokens):
    path = write_parquet(tmp_path / "in.parquet", typed(tokens, pa.list_(pa.bool_())), 5)
    make(path, tmp_path / "out", **OPTIONS)
    assert data_files(tmp_path / "out") == reference


def test_parquet_without_statistics(tmp_path, reference):
    path = tmp_path / "in.parquet"
    pq.write_table(typed(pa.list_(INT64), pa.list_(INT64)), path, write_statistics=False, compression="zstd")
    make(path, tmp_path / "out", **OPTIONS)
    assert data_files(tmp_path / "out") == reference


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("kind", [ipc_file, ipc_stream])
def test_compressed_arrow(tmp_path, reference, kind, compression):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    path = kind(tmp_path / "in.arrow", typed(pa.list_(INT32), pa.list_(INT32), [4, 4, 4]), options=options)
    make(path, tmp_path / "out", **OPTIONS)
    assert data_files(tmp_path / "out") == reference


@pytest.mark.parametrize("kind", [ipc_file, ipc_stream])
def test_dictionary_encoded_columns(tmp_path, reference, kind):
    source = typed(pa.list_(INT32), pa.list_(INT32), [6, 6])
    source = source.set_column(3, "text", source["text"].dictionary_encode())
    path = kind(tmp_path / "in.arrow", source, options=pa.ipc.IpcWriteOptions(unify_dictionaries=True))
    make(path, tmp_path / "out", **OPTIONS)
    assert data_files(tmp_path / "out") == reference


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst"])
@pytest.mark.parametrize("block", [8 << 20, 200])
def test_json_lines(tmp_path, reference, name, block, monkeypatch):
    monkeypatch.setattr("shardgen.read_jsonl.BLOCK_BYTES", block)
    path = json_lines(tmp_path / name, records())
    make(path, tmp_path / "out", **OPTIONS)
    assert data_files(tmp_path / "out") == reference


def test_json_lines_keep_strings_that_look_like_dates(tmp_path, monkeypatch):
    monkeypatch.setattr("shardgen.read_jsonl.BLOCK_BYTES", 60)
    rows = [{"input_ids": [1], "text": text} for text in ("2024-01-31", "no date", "2024-01-31T10:00:00Z")]
    make(json_lines(tmp_path / "in.jsonl", rows), tmp_path / "out", columns=("text",))
    assert [sample["text"] for sample in read_back(tmp_path / "out")] == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"input_ids": [1, 2]}\n{"input_ids": [1, \n', "in.jsonl, lines after row 0"),
        ('{"input_ids": [1, 2]}\n{"input_ids": "one two"}\n', "input_ids"),
        ('{"input_ids": [1.5]}\n', "list<.*double>.*only lists of integers"),
        ("\n\n", "not Parquet"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, lines, message):
    (tmp_path / "in.jsonl").write_text(lines)
    with pytest.raises(UserError, match=message):
        make(tmp_path / "in.jsonl", tmp_path / "out")


def test_a_saved_dataset_is_what_its_state_lists(tmp_path, reference):
    whole = typed(pa.list_(INT32), pa.list_(pa.int8()))
    path = saved_dataset(tmp_path / "saved", [whole.slice(0, 5), whole.slice(5)])
    ipc_stream(tmp_path / "saved" / "cache-0123.arrow", whole)  # what map() leaves behind
    make(path, tmp_path / "out", **OPTIONS)
    assert {k: v for k, v in data_files(tmp_path / "out").items() if "samples" not in k} == {
        k: v for k, v in reference.items() if "samples" not in k
    }
    assert sample_table(tmp_path / "out")["source_file"].to_pylist().count(0) == 5


@pytest.mark.parametrize("block", [4096, 3])
def test_a_saved_dataset_with_an_index_mapping(tmp_path, monkeypatch, block):
    monkeypatch.setattr("shardgen.read_arrow.INDEXED_ROWS", block)
    whole = typed(pa.list_(INT32), pa.list_(pa.int8()))
    picked = [11, 0, 5, 4, 7, 7, 2]
    path = saved_dataset(tmp_path / "saved", [whole.slice(0, 5), whole.slice(5)], picked)
    make(path, tmp_path / "out", boundaries=(12,), columns=("row", "text"))
    found = read_back(tmp_path / "out")
    assert [(sample["row"], sample["input_ids"].tolist()) for sample in found] == [
        (i, ROWS[i]) for i in picked
    ]
    assert sample_table(tmp_path / "out")["source_row"].to_pylist() == list(range(len(picked)))


def test_a_dataset_dict_asks_for_a_split(tmp_path):
    whole = typed(pa.list_(INT32), pa.list_(pa.int8()))
    saved_dataset(tmp_path / "saved" / "train", [whole])
    saved_dataset(tmp_path / "saved" / "test", [whole.slice(0, 2)])
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(UserError, match=r"several splits \(train, test\): name one with --split"):
        make(tmp_path / "saved", tmp_path / "out")
    with pytest.raises(UserError, match=r"no split 'dev'"):
        make(tmp_path / "saved", tmp_path / "out", split="dev")
    assert make(tmp_path / "saved", tmp_path / "out", split="test").num_samples == 2


def fixed(values, size, null=()):
    return pa.array([None if i in null else v for i, v in enumerate(values)], pa.list_(pa.int32(), size))


def variants_of(rows):
    """Arrays whose slices hold just ``rows``, each with neighbours that must not be read."""
    alien = [[900 + i] * 3 for i in range(3)]
    for kind in (pa.list_(INT32), pa.large_list(INT32), pa.list_view(INT32), pa.large_list_view(INT32)):
        yield pa.array([*alien, *rows, *alien], kind).slice(3, len(rows))
    if len({len(row) for row in rows}) == 1 and rows[0]:
        size = len(rows[0])
        yield fixed([[7] * size, *rows, [8] * size], size).slice(1, len(rows))
    values = pa.array([*range(100, 105), *(v for row in rows for v in row), 77], INT32)
    offsets = pa.array(5 + np.cumsum([0, *map(len, rows)]), INT32)
    yield pa.ListArray.from_arrays(offsets, values)
    yield pa.ListArray.from_arrays(pa.array(np.asarray(offsets) - 3, INT32), values.slice(3))
    backwards = [value for row in reversed(rows) for value in row]
    starts = np.cumsum([0, *map(len, reversed(rows))])[:-1][::-1]
    sizes = pa.array([len(row) for row in rows], INT32)
    yield pa.ListViewArray.from_arrays(pa.array(starts, INT32), sizes, pa.array(backwards, INT32))


@given(st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=1, max_size=6))
def test_slices_hold_their_own_rows(rows):
    for array in variants_of(rows):
        found = lists_of(array)
        seen = [
            found.values[start : start + count].tolist()
            for start, count in zip(found.starts, found.num_items, strict=True)
        ]
        assert seen == rows, array.type
        assert not found.null.any() and not found.null_item.any()


def test_slices_of_fixed_size_lists_are_built_as_their_own_rows(tmp_path):
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    source = pa.table({"input_ids": fixed([[9, 9, 9], *rows, [8, 8, 8]], 3).slice(1, 3)})
    for number, write in enumerate((ipc_file, ipc_stream)):
        make(write(tmp_path / f"{number}.arrow", source), tmp_path / f"out-{number}")
        assert [sample["input_ids"].tolist() for sample in read_back(tmp_path / f"out-{number}")] == rows


@given(st.lists(st.one_of(st.none(), st.text(max_size=4)), min_size=1, max_size=6), st.booleans())
def test_text_of_every_type(values, sliced):
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        array = pa.array(["alien", *values, "alien"], kind).slice(1, len(values))
        encoded = array.dictionary_encode() if sliced and kind != pa.string_view() else array
        found = text_of(encoded)
        seen = [
            None if null else found.values[start : start + count].tobytes().decode()
            for start, count, null in zip(found.starts, found.num_items, found.null, strict=True)
        ]
        assert seen == values


def hidden_nulls() -> pa.Array:
    """Row 1 is null but its slots hold tokens; row 3 holds a null token."""
    values = pa.array([1, 2, 3, 4, 5, None, 6], INT32)
    buffers = [pa.py_buffer(bytes([0b1101])), pa.py_buffer(np.array([0, 2, 4, 5, 7], np.int32))]
    return pa.Array.from_buffers(pa.list_(INT32), 4, buffers, children=[values])


@pytest.mark.parametrize("write", [ipc_file, ipc_stream, write_parquet])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_nulls_are_refused_by_row_or_skipped_and_counted(tmp_path, write, with_lengths):
    columns = {"input_ids": hidden_nulls()}
    if with_lengths:
        columns["seq_len"] = pa.array([2, 2, 1, 2], INT32)
    path = write(tmp_path / "in", pa.table(columns))
    with pytest.raises(UserError, match=r"in row 1 is null or holds a null"):
        make(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = make(path, tmp_path / "out", on_null="skip", boundaries=(2,))
    assert manifest.counts["skipped_null"] == 2
    assert [sample["input_ids"].tolist() for sample in read_back(tmp_path / "out")] == [[1, 2], [5]]
    assert sample_table(tmp_path / "out")["source_row"].to_pylist() == [0, 2]


def test_a_null_length_is_a_null_row(tmp_path):
    source = table(token_rows([3, 4, 5]), seq_len=pa.array([3, None, 5], INT32))
    path = write_parquet(tmp_path / "in.parquet", source)
    with pytest.raises(UserError, match=r"in.parquet row 1 is null"):
        make(path, tmp_path / "out")
    manifest = make(path, tmp_path / "out", on_null="skip")
    assert (manifest.num_samples, manifest.num_tokens, manifest.counts["skipped_null"]) == (2, 8, 1)


@pytest.mark.parametrize("column", ["text", "mask", "row"])
@pytest.mark.parametrize("write", [ipc_file, write_parquet])
def test_a_null_in_another_column(tmp_path, column, write):
    source = typed(pa.list_(INT32), pa.list_(pa.uint8()))
    values = [None if i == 4 else value for i, value in enumerate(source[column].to_pylist())]
    position = source.schema.get_field_index(column)
    source = source.set_column(position, column, pa.array(values, source.schema.field(column).type))
    path = write(tmp_path / "in", source)
    with pytest.raises(UserError, match=r"in row 4"):
        make(path, tmp_path / "out", **OPTIONS)
    manifest = make(path, tmp_path / "out", on_null="skip", **OPTIONS)
    assert (manifest.num_samples, manifest.counts["skipped_null"]) == (11, 1)
    rows = sorted((sample["row"], sample["input_ids"].tolist()) for sample in read_back(tmp_path / "out"))
    assert rows == [(i, ROWS[i]) for i in range(12) if i != 4]


def test_integer_types_are_unified_over_files(tmp_path):
    small = write_parquet(
        tmp_path / "a.parquet", pa.table({"input_ids": pa.array([[1, 2]], pa.list_(pa.int16()))})
    )
    large = write_parquet(
        tmp_path / "b.parquet", pa.table({"input_ids": pa.array([[3_000_000_000]], pa.large_list(UINT32))})
    )
    manifest = make([small, large], tmp_path / "out", boundaries=(2,))
    assert manifest.columns == {"input_ids": "ndarray:int64"}
    assert [s["input_ids"].tolist() for s in read_back(tmp_path / "out")] == [[1, 2], [3_000_000_000]]


@pytest.mark.parametrize("statistics", [True, False])
def test_a_token_type_that_is_too_small_is_refused_naming_the_value(tmp_path, statistics):
    path = tmp_path / "in.parquet"
    pq.write_table(table([[5, 128_000], [7, 8]]), path, write_statistics=statistics)
    with pytest.raises(UserError, match=r"128000 of column 'input_ids' does not fit uint16"):
        make(path, tmp_path / "out", token_dtype="uint16")
    manifest = make(path, tmp_path / "out")
    assert manifest.columns["input_ids"] == "ndarray:int32"
    assert max(sample["input_ids"].max() for sample in read_back(tmp_path / "out")) == 128_000


def test_more_than_2_to_the_31_values_in_one_column(tmp_path):
    # 300 chunks that share one buffer: 2.4e9 values without the memory for them.
    values = pa.array(np.zeros(8_000_000, np.uint8))
    offsets = pa.array([0, 8_000_000], INT32)
    chunk = pa.ListArray.from_arrays(offsets, values)
    whole = pa.table({"input_ids": pa.chunked_array([chunk] * 300), "seq_len": [8_000_000] * 300})
    from shardgen.columns import list_lengths

    lengths = np.concatenate([list_lengths(part)[0] for part in whole["input_ids"].chunks])
    assert int(lengths.sum()) == 2_400_000_000 > 1 << 31


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_the_length_column_spares_reading_the_tokens(tmp_path, kind):
    source = table(ROWS, seq_len=pa.array(LENGTHS, INT32))
    if kind == "jsonl":
        path = json_lines(tmp_path / "in.jsonl", source.to_pylist())
    else:
        path = (write_parquet if kind == "parquet" else ipc_file)(tmp_path / "in", source)
    read = []
    import shardgen.formats as formats

    original = formats.SourceFile.batches

    def spy(self, columns, *args, **kwargs):
        read.extend(columns)
        return original(self, columns, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats.SourceFile, "batches", spy)
        found = read_lengths([path])
    assert found.lengths.tolist() == LENGTHS
    assert set(read) == {"seq_len"}


def test_read_lengths_of_everything(tmp_path):
    plain = write_parquet(tmp_path / "in.parquet", table(ROWS))
    make(plain, tmp_path / "out", boundaries=(4, 12))
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    assert read_lengths([plain]).lengths.tolist() == LENGTHS
    assert read_lengths([str(tmp_path / "lengths.npy")]).lengths.tolist() == LENGTHS
    assert sorted(read_lengths([str(tmp_path / "out")]).lengths.tolist()) == sorted(LENGTHS)
    empty = write_parquet(tmp_path / "empty.parquet", table([[1], [], [2, 3]]))
    found = read_lengths([empty])
    assert (found.lengths.tolist(), found.num_skipped) == ([1, 2], 1)


def test_inputs_are_expanded_in_order(tmp_path):
    for name in ("b/2.parquet", "b/10.parquet", "a/1.parquet", "b/.hidden.parquet", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / name, table([[1]]))
    b, a = str(tmp_path / "b"), str(tmp_path / "a")
    assert [Path(p).name for p in expand([b, a])] == ["10.parquet", "2.parquet", "1.parquet"]
    assert [Path(p).name for p in expand([f"{tmp_path}/*/1*.parquet"])] == ["1.parquet", "10.parquet"]
    with pytest.raises(UserError, match=r"2.parquet is named twice"):
        expand([b, f"{b}/2.parquet"])
    make([a], tmp_path / "a" / "built")
    assert [Path(p).name for p in expand([a])] == ["1.parquet"]  # our own build is no source
    with pytest.raises(UserError, match=r"is a finished build, not a source"):
        expand([str(tmp_path / "a" / "built")])


@pytest.mark.parametrize(
    ("make_input", "message"),
    [
        (lambda path: "missing.parquet", "missing.parquet does not exist"),
        (lambda path: f"{path}/*.parquet", "matches no file"),
        (lambda path: str(path), "holds no data file"),
    ],
)
def test_inputs_that_are_not_there(tmp_path, make_input, message):
    with pytest.raises(UserError, match=message):
        open_sources([make_input(tmp_path)])


def test_files_that_are_no_data(tmp_path):
    (tmp_path / "in.parquet").write_bytes(b"PAR1 and then nonsense")
    with pytest.raises(UserError, match=r"in.parquet cannot be read"):
        open_sources([str(tmp_path / "in.parquet")])
    (tmp_path / "in.csv").write_text("input_ids\n1 2 3\n")
    with pytest.raises(UserError, match=r"in.csv is not Parquet, nor Arrow IPC, nor JSON lines"):
        open_sources([str(tmp_path / "in.csv")])
    path = write_parquet(tmp_path / "ok.parquet", pa.table({"ids": [[1]], "input_ids": ["text"]}))
    with pytest.raises(UserError, match=r"ok.parquet has no column 'tokens'"):
        make(path, tmp_path / "out", tokens_column="tokens")
    with pytest.raises(UserError, match=r"column 'input_ids' has type string: only lists of integers"):
        make(path, tmp_path / "out")
    with pytest.raises(UserError, match=r"no column 'n' \(it has 'ids', 'input_ids'\).*--length-column"):
        make(path, tmp_path / "out", tokens_column="ids", length_column="n")


def test_reading_lengths_imports_no_torch(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", table(ROWS))
    code = (
        "import sys\nfrom shardgen.sources import read_lengths\n"
        "assert 'pyarrow' not in sys.modules\n"
        f"print(read_lengths([{path!r}]).lengths.tolist())\n"
        "assert not {'torch', 'streaming'} & set(sys.modules)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert (found.stdout.strip(), found.stderr) == (str(LENGTHS), "")
