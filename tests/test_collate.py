"""The collator against a row-by-row reference in plain Python."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streaming import MDSWriter

from loader.collate import IGNORED, BatchShape, Collator, real_and_padding
from loader.columns import pad_value
from loader.raw import RawBatch
from loader.shards import SampleReader, ShardInfo
from shardgen.errors import UserError

COLUMNS = {
    "input_ids": "ndarray:uint16",
    "loss_mask": "ndarray:uint8",
    "weights": "ndarray:float32",
    "embedding": "ndarray:float16",
    "image_size": "ndarray:int32:2",
    "pieces": "ndarray:int32",
    "row": "int",
    "score": "float64",
    "name": "str",
    "info": "json",
}


def write(folder, columns, samples, limit=None):
    with MDSWriter(out=str(folder), columns=columns, size_limit=limit) as out:
        for sample in samples:
            out.write(sample)
    shards = ShardInfo.from_index(json.loads((folder / "index.json").read_text()))
    return SampleReader(shards, lambda n: os.path.join(folder, shards[n].basename))


def make_samples(count=60):
    rng = np.random.default_rng(5)
    samples = []
    for i in range(count):
        n = int(rng.choice([1, 2, 3, 17, 255, 256, 300]))
        samples.append(
            {
                "input_ids": rng.integers(0, 1 << 16, n, dtype=np.uint16),
                "loss_mask": rng.integers(0, 3, n, dtype=np.uint8),
                "weights": rng.random(n, dtype=np.float32),
                "embedding": rng.random((n, 3)).astype(np.float16),
                "image_size": rng.integers(0, 99, 2, dtype=np.int32),
                "pieces": np.arange(n + 1, dtype=np.int32),
                "row": i,
                "score": float(rng.normal()),
                "name": f"é{i}",
                "info": {"i": i},
            }
        )
    return samples


SAMPLES = make_samples()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    found = write(tmp_path_factory.mktemp("set"), COLUMNS, SAMPLES, limit=30_000)
    assert len(found.shards) > 3
    return found


def reference_labels(sample, labels, masked, filler):
    kept = []
    for position, token in enumerate(sample["input_ids"].tolist()):
        counts = not filler
        counts &= not (masked and sample["loss_mask"][position] == 0)
        counts &= not (labels == "causal" and position == 0)
        kept.append(token if counts else IGNORED)
    return kept


def reference_padded(ids, shape, labels, masked, filler, pad):
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in (SAMPLES[i] for i in ids):
        n = len(sample["input_ids"])
        rest = shape.padded_length - n
        batch["input_ids"].append(sample["input_ids"].tolist() + [pad] * rest)
        batch["attention_mask"].append([True] * n + [False] * rest)
        batch["labels"].append(reference_labels(sample, labels, masked, filler) + [IGNORED] * rest)
    for _ in range(shape.num_rows - len(ids)):
        batch["input_ids"].append([pad] * shape.padded_length)
        batch["attention_mask"].append([True] + [False] * (shape.padded_length - 1))
        batch["labels"].append([IGNORED] * shape.padded_length)
    if labels is None:
        del batch["labels"]
    return batch


def as_lists(batch):
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


rows = st.lists(st.integers(0, len(SAMPLES) - 1), min_size=1, max_size=12)


@given(
    ids=rows,
    extra_rows=st.integers(0, 2),
    extra_length=st.sampled_from([0, 1, 9]),
    labels=st.sampled_from(["causal", "tokens", None]),
    masked=st.booleans(),
    filler=st.booleans(),
    pad=st.sampled_from([0, 7, -1, 1 << 20]),
    sent=st.booleans(),
)
def test_padded_equals_the_reference(
    reader, ids, extra_rows, extra_length, labels, masked, filler, pad, sent
):
    longest = max(len(SAMPLES[i]["input_ids"]) for i in ids)
    shape = BatchShape(num_rows=len(ids) + extra_rows, padded_length=longest + extra_length)
    collate = Collator(
        labels=labels, loss_mask_column="loss_mask" if masked else None, pad_values={"input_ids": pad}
    )
    if sent:
        raw = pickle.loads(pickle.dumps(collate.read(reader, np.array(ids))))
        batch = collate.finish(raw, shape, filler=filler)
    else:
        batch = collate(reader, np.array(ids), shape, filler=filler)
    assert as_lists(batch) == reference_padded(ids, shape, labels, masked, filler, pad)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].dtype == torch.bool
    if labels:
        assert batch["labels"].dtype == torch.int64
    assert all(tensor.is_contiguous() for tensor in batch.values())


@given(
    length=st.sampled_from([1, 2, 40, 300, 65535, 65536]),
    gaps=st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 30, 65000]), min_size=1, max_size=6),
)
def test_few_or_many_padding_cells_are_the_same_cells(length, gaps):
    limits = np.array([max(length - gap, 1) for gap in gaps])
    real, padding = real_and_padding(limits, length)
    flat = np.zeros(len(limits) * length, int)
    flat[padding] = 1
    for row, cells, limit in zip(real, flat.reshape(-1, length), limits, strict=True):
        assert row.tolist() == [True] * limit + [False] * (length - limit)
        assert cells.tolist() == [0] * limit + [1] * (length - limit)


@given(
    ids=rows,
    labels=st.sampled_from(["causal", "tokens", None]),
    masked=st.booleans(),
    filler=st.booleans(),
    sent=st.booleans(),
)
def test_packed_equals_the_reference(reader, ids, labels, masked, filler, sent):
    collate = Collator(labels=labels, loss_mask_column="loss_mask" if masked else None, layout="packed")
    raw = collate.read(reader, np.array(ids))
    if sent:
        raw = pickle.loads(pickle.dumps(raw))
    batch = collate.finish(raw, BatchShape(num_rows=1, padded_length=1), filler=filler)
    expected = {"input_ids": [], "position_ids": [], "labels": [], "cu_seqlens": [0], "max_seqlen": 0}
    for sample in (SAMPLES[i] for i in ids):
        n = len(sample["input_ids"])
        expected["input_ids"] += sample["input_ids"].tolist()
        expected["position_ids"] += range(n)
        expected["labels"] += reference_labels(sample, labels, masked, filler)
        expected["cu_seqlens"].append(expected["cu_seqlens"][-1] + n)
        expected["max_seqlen"] = max(expected["max_seqlen"], n)
    if labels is None:
        del expected["labels"]
    assert as_lists(batch) == expected
    assert type(batch["max_seqlen"]) is int
    assert batch["cu_seqlens"].dtype == torch.int32
    assert {batch[name].dtype for name in ("input_ids", "position_ids")} == {torch.int64}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("shape", ["", ":3"])
def test_every_token_dtype_is_widened_right(tmp_path, dtype, shape):
    info = np.iinfo(dtype)
    values = [[info.min, min(info.max, 2**63 - 1), 1], [5, 4, 3]]
    reader = write(
        tmp_path,
        {"input_ids": f"ndarray:{dtype}{shape}"},
        [{"input_ids": np.array(row, dtype)} for row in values],
    )
    batch = Collator()(reader, np.array([1, 0]), BatchShape(num_rows=2, padded_length=3))
    assert batch["input_ids"].tolist() == [values[1], values[0]]
    assert batch["input_ids"].dtype == torch.int64


def test_tokens_that_fit_no_tensor_are_refused(tmp_path):
    reader = write(
        tmp_path, {"input_ids": "ndarray:uint64"}, [{"input_ids": np.array([1 << 63], np.uint64)}] * 2
    )
    shape = BatchShape(num_rows=1, padded_length=1)
    for layout in ("padded", "packed"):
        with pytest.raises(UserError, match=r"above 2\*\*63 - 1"):
            Collator(layout=layout)(reader, np.array([0]), shape)


def test_tokens_that_are_no_integers_are_refused(reader):
    with pytest.raises(UserError, match="tokens column 'weights' holds float32, not integers"):
        Collator(tokens_column="weights").read(reader, np.array([0]))


# ---------------------------------------------------------------- other columns

OTHERS = ("weights", "embedding", "image_size", "pieces", "row", "score", "name", "info", "loss_mask")


@given(ids=rows, extra_rows=st.integers(0, 2), sent=st.booleans(), pad=st.sampled_from([0, 3]))
def test_columns_are_padded_stacked_or_listed(reader, ids, extra_rows, sent, pad):
    longest = max(len(SAMPLES[i]["input_ids"]) for i in ids)
    shape = BatchShape(num_rows=len(ids) + extra_rows, padded_length=longest + 1)
    padded = ("weights", "embedding", "loss_mask")
    collate = Collator(columns=OTHERS, pad_values=dict.fromkeys(padded, pad))
    raw = collate.read(reader, np.array(ids))
    batch = collate.finish(pickle.loads(pickle.dumps(raw)) if sent else raw, shape)
    assert list(batch) == ["input_ids", "attention_mask", "labels", *OTHERS]
    for name, dtype in zip(padded, (torch.float32, torch.float16, torch.uint8), strict=True):
        tail = SAMPLES[0][name].shape[1:]
        assert batch[name].dtype == dtype
        assert batch[name].shape == (shape.num_rows, shape.padded_length, *tail)
        expected = np.full(batch[name].shape, pad, SAMPLES[0][name].dtype)
        for row, i in enumerate(ids):
            expected[row, : len(SAMPLES[i][name])] = SAMPLES[i][name]
        assert batch[name].numpy().tobytes() == expected.tobytes()
    assert batch["row"].dtype == torch.int64
    assert batch["row"].tolist() == ids + [0] * extra_rows
    assert batch["score"].dtype == torch.float64
    assert batch["score"].tolist() == [SAMPLES[i]["score"] for i in ids] + [0.0] * extra_rows
    for name in ("image_size", "pieces"):
        got = [item.tolist() for item in batch[name][: len(ids)]]
        assert got == [SAMPLES[i][name].tolist() for i in ids]
        assert batch[name][len(ids) :] == [None] * extra_rows
    for name in ("name", "info"):
        assert batch[name] == [SAMPLES[i][name] for i in ids] + [None] * extra_rows


@given(ids=rows)
def test_packed_columns_are_joined(reader, ids):
    batch = Collator(columns=OTHERS, layout="packed")(
        reader, np.array(ids), BatchShape(num_rows=1, padded_length=1)
    )
    for name in ("weights", "embedding", "loss_mask"):
        expected = np.concatenate([SAMPLES[i][name] for i in ids])
        assert batch[name].shape == expected.shape
        assert batch[name].numpy().tobytes() == expected.tobytes()
    assert batch["row"].tolist() == ids
    assert batch["name"] == [SAMPLES[i]["name"] for i in ids]


def test_a_fixed_shape_is_not_the_tokens_by_chance(reader):
    two = [i for i, sample in enumerate(SAMPLES) if len(sample["input_ids"]) == 2][:2]
    assert two
    batch = Collator(columns=["image_size"])(
        reader, np.array(two), BatchShape(num_rows=len(two), padded_length=2)
    )
    assert isinstance(batch["image_size"], list)


def test_delivered_tensors_can_be_written_to(reader):
    """Nothing delivered is a view of a read-only map."""
    batch = Collator(columns=OTHERS)(reader, np.array([3]), BatchShape(num_rows=1, padded_length=300))
    before = reader.sample(3)["pieces"].tolist()
    for value in batch.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
    assert reader.sample(3)["pieces"].tolist() == before


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("pieces", r"column 'pieces' of shard .*, sample 0 \(row 0\) at bytes \d+:\d+ is shape"),
        ("name", "column 'name' of shard .* is a str, not one entry for each of its"),
    ],
)
def test_a_pad_value_says_that_the_column_follows_the_tokens(reader, column, message):
    with pytest.raises(UserError, match=message):
        Collator(columns=[column], pad_values={column: 0}).read(reader, np.array([0]))


def test_a_pad_value_of_a_number_fills_missing_rows(reader):
    batch = Collator(columns=["row"], pad_values={"row": -1})(
        reader, np.array([4]), BatchShape(num_rows=3, padded_length=300)
    )
    assert batch["row"].tolist() == [4, -1, -1]


@pytest.mark.parametrize(
    ("pad", "dtype", "expected"),
    [(-100, "int64", -100), (255, "uint8", 255), (2.0, "int8", 2), (1, "float32", 1.0), (True, "uint8", 1)],
)
def test_pad_values_that_fit(pad, dtype, expected):
    value = pad_value("x", pad, np.dtype(dtype))
    assert (value, value.dtype) == (expected, np.dtype(dtype))


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [(-100, "uint16"), (256, "uint8"), (0.5, "int64"), ("a", "int8"), (None, "float32"), (1e40, "float32")],
)
def test_pad_values_never_become_another_number(reader, pad, dtype):
    with pytest.raises(UserError, match=f"pad_values: .* for column 'x' is no {dtype}"):
        pad_value("x", pad, np.dtype(dtype))


# ---------------------------------------------------------------- arguments and errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": "masked"}, "labels='masked': use 'causal', 'tokens' or None"),
        ({"layout": "flat"}, "layout='flat': use 'padded' or 'packed'"),
        ({"columns": ["labels"]}, "'labels' is made by the loader"),
        ({"columns": ["attention_mask"]}, "'attention_mask' is made by the loader"),
        ({"columns": ["position_ids"], "layout": "packed"}, "'position_ids' is made by the loader"),
        ({"tokens_column": "ids", "columns": ["input_ids"]}, "'input_ids' is made by the loader"),
        ({"pad_values": {"typo": 1}, "columns": ["a"]}, "'typo' is none of the columns a, input_ids"),
        ({"pad_values": {"input_ids": 0.5}}, "0.5 for column 'input_ids' is no int64"),
        ({"pad_values": {"input_ids": None}}, "None for column 'input_ids' is no int64"),
    ],
)
def test_contradicting_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Collator(**arguments)


def test_stored_labels_can_be_delivered(tmp_path):
    samples = [{"ids": np.arange(n, dtype=np.int32), "labels": np.arange(n) * 10} for n in (3, 1)]
    reader = write(tmp_path, {"ids": "ndarray:int32", "labels": "ndarray:int64"}, samples)
    collate = Collator(
        tokens_column="ids", labels=None, columns=["ids", "labels"], pad_values={"labels": -100}
    )
    batch = collate(reader, np.array([0, 1]), BatchShape(num_rows=2, padded_length=3))
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["labels"].tolist() == [[0, 10, 20], [0, -100, -100]]


def test_rows_that_do_not_fit_the_shape(reader):
    long = int(np.argmax([len(sample["input_ids"]) for sample in SAMPLES]))
    with pytest.raises(
        UserError, match=rf"1 rows up to 300 tokens \(sample {long}\) do not fit .* 1 rows x 299"
    ):
        Collator()(reader, np.array([long]), BatchShape(num_rows=1, padded_length=299))
    with pytest.raises(UserError, match=r"2 rows up to .* do not fit a batch of 1 rows"):
        Collator()(reader, np.array([0, 1]), BatchShape(num_rows=1, padded_length=300))
    with pytest.raises(UserError, match="a batch of 0 rows x 4 tokens is empty"):
        BatchShape(num_rows=0, padded_length=4)


def test_lengths_that_are_not_the_ones_planned(reader):
    lengths = np.array([len(SAMPLES[i]["input_ids"]) for i in (4, 5)])
    Collator().read(reader, np.array([4, 5]), lengths)
    lengths[1] += 1
    found, said = lengths[1] - 1, lengths[1]
    message = rf"sample 5 .*: column 'input_ids' holds {found} values, but the set's lengths say {said}"
    with pytest.raises(UserError, match=message):
        Collator().read(reader, np.array([4, 5]), lengths)


def test_a_loss_mask_of_another_length(tmp_path):
    samples = [{"input_ids": np.zeros(n, np.uint16), "m": np.ones(3, np.uint8)} for n in (3, 4)]
    reader = write(tmp_path, {"input_ids": "ndarray:uint16", "m": "ndarray:uint8"}, samples)
    collate = Collator(loss_mask_column="m")
    collate.read(reader, np.array([0]))
    with pytest.raises(UserError, match=r"sample 1 .*: column 'm' holds 3 values, but its tokens are 4"):
        collate.read(reader, np.array([0, 1]))


@pytest.mark.parametrize(
    ("dtype", "values"), [("uint8", [0, 1, 255]), ("int64", [0, 256, -1]), ("float32", [0.0, 0.5, 1.0])]
)
def test_any_number_but_zero_counts_in_a_loss_mask(tmp_path, dtype, values):
    sample = {"input_ids": np.array([7, 8, 9], np.uint16), "m": np.array(values, dtype)}
    reader = write(tmp_path, {"input_ids": "ndarray:uint16", "m": f"ndarray:{dtype}"}, [sample])
    batch = Collator(loss_mask_column="m")(reader, np.array([0]), BatchShape(num_rows=1, padded_length=4))
    assert batch["labels"].tolist() == [[IGNORED, 8, 9, IGNORED]]


def test_a_static_shape_with_no_row_at_all(reader):
    batch = Collator(columns=("weights", "row", "name"), pad_values={"input_ids": 9})(
        reader, np.array([], np.int64), BatchShape(num_rows=2, padded_length=2)
    )
    assert batch["input_ids"].tolist() == [[9, 9], [9, 9]]
    assert batch["attention_mask"].tolist() == [[True, False]] * 2
    assert batch["labels"].tolist() == [[IGNORED] * 2] * 2
    assert batch["weights"].tolist() == [[0.0, 0.0]] * 2
    assert batch["row"].tolist() == [0, 0]
    assert batch["name"] == [None, None]


def test_a_raw_batch_is_narrow_when_sent(reader):
    ids = np.array([i for i, sample in enumerate(SAMPLES) if len(sample["input_ids"]) >= 255])
    raw = Collator(loss_mask_column="loss_mask").read(reader, ids)
    sent = pickle.dumps(raw)
    cells = len(ids) * 300
    assert len(sent) < cells * (2 + 1 / 8) + 1500  # two bytes a token, one bit of mask
    back = pickle.loads(sent)
    assert isinstance(back, RawBatch)
    assert back.tokens == raw.tokens
    assert np.array_equal(back.loss, raw.loss)
    assert back.sample_ids.tolist() == ids.tolist()


def test_long_rows_are_padded_past_the_first_buffer_of_zeros(tmp_path):
    samples = [{"input_ids": np.ones(n, np.int64)} for n in (1, 200_000)]
    reader = write(tmp_path, {"input_ids": "ndarray:int64"}, samples)
    batch = Collator()(reader, np.array([0, 1]), BatchShape(num_rows=2, padded_length=200_000))
    assert batch["input_ids"].sum(1).tolist() == [1, 200_000]
