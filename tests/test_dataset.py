"""Construction, stock attributes, and what may never happen to the only copy of the data."""

import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import make_dataset, row_tokens
from streaming import Stream, StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.format import reader_from_json
from streaming.base.world import World as StreamingWorld

import loader.source
from loader import BucketedDataLoader, BucketedDataset
from loader.arguments import REPLACED
from loader.source import DownloadError, ShardSource
from loader.stream import AtomicStream
from shardgen.cost import CostModel
from shardgen.errors import UserError

LENGTHS = np.random.default_rng(9).integers(1, 51, 400)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return make_dataset(
        tmp_path_factory.mktemp("set"), LENGTHS, token_budget=128, num_buckets=3, shard_size=1 << 13
    )


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    return make_dataset(
        tmp_path_factory.mktemp("zip"), LENGTHS, token_budget=128, num_buckets=3, compression="zstd:3"
    )


@pytest.fixture(autouse=True)
def own_temp(tmp_path_factory, monkeypatch):
    """A temp directory per test, so that what is left there can be counted."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    monkeypatch.setattr("tempfile.tempdir", None)


def files(folder):
    """Everything under a folder: path, size, time of the last change, content."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns, p.read_bytes())
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def delivered(dataset):
    return sorted(i for batch in BucketedDataLoader(dataset) for i in batch.meta.sample_ids.tolist())


# --- upstream -----------------------------------------------------------------------------------------


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (StreamingDataset.prepare_shard, ["self", "shard_id", "blocking"]),
        (StreamingDataset.evict_shard, ["self", "shard_id"]),
        (StreamingDataset.evict_coldest_shard, ["self"]),
        (StreamingDataset._evict_shard, ["self", "shard_id"]),
        (StreamingDataset._evict_coldest_shard, ["self"]),
        (StreamingDataset.get_item, ["self", "sample_id", "retry"]),
        (StreamingDataset.state_dict, ["self", "num_samples", "from_beginning"]),
        (StreamingDataset.load_state_dict, ["self", "obj"]),
        (StreamingDataset.__iter__, ["self"]),
        (StreamingDataset.__len__, ["self"]),
        (StreamingDataset.__del__, ["self"]),
        (Stream._download_file, ["self", "from_basename", "to_basename"]),
        (
            Stream._decompress_shard_part,
            ["self", "zip_info", "zip_filename", "raw_filename", "compression"],
        ),
        (Stream.prepare_shard, ["self", "shard"]),
        (reader_from_json, ["dirname", "split", "obj"]),
        (StreamingWorld.__init__, ["self", "num_nodes", "ranks_per_node", "workers_per_rank", "worker"]),
        (StreamingWorld.replicate, ["self", "replication"]),
    ],
)
def test_upstream_signatures_that_we_rely_on(function, expected):
    assert parameters(function) == expected


def test_upstream_constructor_arguments_are_all_taken_or_refused():
    ours = set(parameters(BucketedDataset.__init__))
    theirs = set(parameters(StreamingDataset.__init__))
    assert theirs - ours == set(REPLACED)
    assert not set(REPLACED) & ours


def test_upstream_shard_states():
    assert [(s.name, int(s)) for s in _ShardState] == [
        ("INVALID", 0),
        ("REMOTE", 1),
        ("PREPARING", 2),
        ("LOCAL", 3),
    ]


def test_few_files_import_streaming():
    folder = Path(loader.source.__file__).parent
    found = {
        path.name
        for path in folder.glob("*.py")
        if any(
            line.startswith(("from streaming", "import streaming")) for line in path.read_text().splitlines()
        )
    }
    assert found == {"dataset.py", "resident.py", "source.py", "stream.py"}


def test_it_is_a_streaming_dataset_with_stock_attributes(out):
    ours, stock = BucketedDataset(local=str(out)), StreamingDataset(local=str(out), batch_size=1)
    assert isinstance(ours, StreamingDataset) and issubclass(BucketedDataset, ShardSource)
    for name in ("size", "num_samples", "num_shards", "num_streams", "epoch_size", "length", "next_epoch"):
        assert getattr(ours, name) == getattr(stock, name), name
    for name in (
        *("samples_per_shard", "sample_offset_per_shard", "stream_per_shard"),
        *("shards_per_stream", "samples_per_stream", "sample_offset_per_stream", "shard_offset_per_stream"),
    ):
        np.testing.assert_array_equal(getattr(ours, name), getattr(stock, name))
    for sample in (0, 17, 399, -1):
        assert ours[sample]["row"] == stock[sample]["row"]
        np.testing.assert_array_equal(ours[sample]["input_ids"], stock[sample]["input_ids"])
    assert [s["row"] for s in ours[3:6]] == [s["row"] for s in stock[3:6]]


def test_a_sample_is_the_source_row(out):
    dataset = BucketedDataset(local=str(out))
    for sample in range(400):
        item = dataset[sample]
        row = int(item["row"])
        assert dataset.lengths[sample] == LENGTHS[row] == len(item["input_ids"])
        np.testing.assert_array_equal(item["input_ids"], row_tokens(row, LENGTHS[row]))


# --- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_contradicting_upstream_arguments_name_ours(out, name):
    with pytest.raises(TypeError, match=f"takes no {name}=.*use "):
        BucketedDataset(local=str(out), **{name: 1})


def test_unknown_and_positional_arguments(out):
    with pytest.raises(TypeError, match="unexpected keyword argument 'token_buget'"):
        BucketedDataset(local=str(out), token_buget=3)
    with pytest.raises(TypeError):
        BucketedDataset(str(out))


def test_build_options_are_the_defaults(tmp_path):
    out = make_dataset(
        tmp_path,
        LENGTHS,
        token_budget=256,
        boundaries=(20, 40),
        max_batch_size=5,
        pad_to_multiple_of=8,
        padding="boundary",
        cost_model=CostModel(quadratic_length=100, overhead_tokens=3),
        cost_budget=500,
    )
    options = BucketedDataset(local=str(out)).plan_options
    assert options.boundaries == (0, 20, 40, 50)
    assert (options.token_budget, options.max_batch_size, options.pad_to_multiple_of) == (256, 5, 8)
    assert (options.padding, options.cost_budget) == ("boundary", 500)
    assert (options.quadratic_length, options.overhead_tokens) == (100, 3)
    other = BucketedDataset(
        local=str(out),
        token_budget=100,
        boundaries=[0, 30],
        max_batch_size=9,
        pad_to_multiple_of=1,
        padding="longest",
        cost_model=CostModel(),
        cost_budget=1000,
    ).plan_options
    assert other.boundaries == (0, 30, 50)
    assert (other.token_budget, other.max_batch_size, other.pad_to_multiple_of) == (100, 9, 1)
    assert (other.padding, other.cost_budget, other.quadratic_length) == ("longest", 1000, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"token_budget": 49},
            r"sample \d+ has 50 tokens but token_budget 49 .*at most 49 \(\d+ of 400 samples",
        ),
        (
            {"token_budget": 55, "pad_to_multiple_of": 16},
            "pad_to_multiple_of 16 lets a sample have at most 48",
        ),
        ({"token_budget": 0}, "token_budget 0"),
        ({"lookahead": 0}, "lookahead 0"),
        ({"accumulate": 0}, "accumulate 0"),
        ({"layout": "diagonal"}, "diagonal"),
        ({"labels": "masked"}, "masked"),
        ({"columns": ["color"]}, "color"),
        ({"pad_values": {"color": 1}}, "color"),
        ({"skip": [400]}, r"sample 400 is outside 0\.\.399"),
        ({"skip": [-1, 3]}, "sample -1"),
        ({"buckets": [7]}, "bucket 7"),
        ({"weights": [1.0]}, "1 weights for 3 buckets"),
        ({"boundaries": [20, 10]}, "ascending"),
        ({"boundaries": [20], "num_buckets": 5}, "give one of the two"),
        ({"cache_limit": "1gb"}, "would delete the only copy"),
        ({"download_retry": 0}, "download_retry 0"),
        ({"predownload_batches": -1}, "predownload_batches -1"),
        ({"seed": -1}, "seed -1"),
        ({"tail": "drop"}, "drop"),
        ({"block_samples": 0}, "block_samples 0"),
    ],
)
def test_values_that_make_no_sense_are_one_clear_line(out, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        BucketedDataset(local=str(out), **arguments)
    assert "\n" not in str(error.value)


def test_samples_above_the_budget_may_be_skipped(out):
    lengths = BucketedDataset(local=str(out)).lengths
    long = np.flatnonzero(lengths > 45)
    with pytest.raises(UserError, match="1 of 400 samples are too long"):
        BucketedDataset(local=str(out), token_budget=45, skip=long[1:])
    dataset = BucketedDataset(local=str(out), token_budget=45, skip=long)
    assert delivered(dataset) == np.flatnonzero(lengths <= 45).tolist()


def test_lanes_that_do_not_divide_a_step_are_refused(out):
    with pytest.raises(UserError, match="num_canonical_nodes 3 does not divide the 2 batches"):
        iter(BucketedDataLoader(BucketedDataset(local=str(out), num_canonical_nodes=3, accumulate=2)))


def test_buckets_and_weights(out):
    dataset = BucketedDataset(local=str(out), buckets=[0, 2])
    counts = [bucket.num_samples for bucket in dataset.manifest.buckets]
    ends = np.cumsum([0, *counts])
    assert delivered(dataset) == [*range(ends[1]), *range(ends[2], ends[3])]
    twice = delivered(BucketedDataset(local=str(out), weights=[2, 0, 1]))
    assert twice == sorted([*range(ends[1]), *range(ends[1]), *range(ends[2], ends[3])])


# --- directories --------------------------------------------------------------------------------------


def test_what_is_no_dataset(tmp_path, out):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="is not a dataset"):
            BucketedDataset(local=str(path))
    with pytest.raises(UserError, match="give local="):
        BucketedDataset()
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no manifest\.json"):
        BucketedDataset(local=str(copy))


def test_damaged_small_files(tmp_path, out):
    def copy(name):
        shutil.copytree(out, tmp_path / name)
        return tmp_path / name

    (copy("a") / "index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json is missing"):
        BucketedDataset(local=str(tmp_path / "a"))
    (copy("b") / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        BucketedDataset(local=str(tmp_path / "b"))
    index = json.loads((copy("c") / "index.json").read_text())
    (tmp_path / "c/index.json").write_text(json.dumps({**index, "shards": index["shards"][1:]}))
    with pytest.raises(UserError, match="different builds"):
        BucketedDataset(local=str(tmp_path / "c"))
    path = copy("d") / "bucket-01/samples.parquet"
    pq.write_table(pq.read_table(path)[:-1], path)
    with pytest.raises(UserError, match=r"samples\.parquet has \d+ rows"):
        BucketedDataset(local=str(tmp_path / "d"))
    (copy("e") / "bucket-01/samples.parquet").write_text("no")
    with pytest.raises(UserError, match=r"samples\.parquet cannot be read"):
        BucketedDataset(local=str(tmp_path / "e"))


def test_split(tmp_path, out):
    shutil.copytree(out, tmp_path / "train")
    assert delivered(BucketedDataset(local=str(tmp_path), split="train")) == list(range(400))
    with pytest.raises(UserError, match="val is not a dataset"):
        BucketedDataset(local=str(tmp_path), split="val")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_local_set_is_never_written_or_deleted(out, own_temp, num_workers):
    before = files(out)
    dataset = BucketedDataset(local=str(out), remote=str(out))  # the same place is no other copy
    loader = BucketedDataLoader(dataset, num_workers=num_workers)
    for _ in range(2):
        list(loader)
    loader.close()
    for action in (dataset.evict_coldest_shard, lambda: dataset.evict_shard(0)):
        with pytest.raises(UserError, match="only copy"):
            action()
    assert files(out) == before
    assert not any(own_temp.rglob("*"))  # and nothing is left elsewhere


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_compressed_local_set_is_decompressed_elsewhere(compressed, own_temp, num_workers):
    before = files(compressed)
    assert any(name.endswith(".zstd") for name in before) and not any(n.endswith(".mds") for n in before)
    dataset = BucketedDataset(local=str(compressed))
    loader = BucketedDataLoader(dataset, num_workers=num_workers)
    rows = sorted(i for batch in loader for i in batch.meta.sample_ids.tolist())
    loader.close()
    assert rows == list(range(400))
    np.testing.assert_array_equal(dataset[7]["input_ids"], row_tokens(dataset[7]["row"], dataset.lengths[7]))
    assert files(compressed) == before
    found = [path for path in own_temp.rglob("*.mds")]
    assert len(found) == dataset.num_shards
    assert not list(own_temp.rglob("*.part*")) and not list(own_temp.rglob("*.zstd"))


def test_cache_dir_takes_the_decompressed_copies(compressed, tmp_path):
    dataset = BucketedDataset(local=str(compressed), cache_dir=str(tmp_path / "cache"))
    assert delivered(dataset) == list(range(400))
    assert len(list((tmp_path / "cache").rglob("*.mds"))) == dataset.num_shards


def test_raw_files_beside_compressed_ones_are_used_and_kept(compressed, tmp_path, own_temp):
    """Constructing a stock dataset over raw files alone of a compressed build deletes them all."""
    copy = tmp_path / "raw"
    shutil.copytree(compressed, copy)
    reader = BucketedDataset(local=str(copy), cache_dir=str(tmp_path / "cache"))
    delivered(reader)
    for path in (tmp_path / "cache").rglob("*.mds"):
        shutil.copy(path, copy / path.relative_to(tmp_path / "cache"))
    for path in copy.rglob("*.zstd"):
        path.unlink()
    before = files(copy)
    assert delivered(BucketedDataset(local=str(copy))) == list(range(400))
    assert files(copy) == before


def test_a_missing_shard_of_a_local_set_names_it(out, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    next(copy.rglob("shard.00001.mds")).unlink()
    for way in ({}, {"num_workers": 1}):
        loader = BucketedDataLoader(BucketedDataset(local=str(copy)), **way)
        with pytest.raises(UserError, match=r"shard\.00001\.mds"):
            list(loader)
        loader.close()


def test_two_datasets_in_one_process(out, compressed):
    train, again = BucketedDataset(local=str(out), seed=1), BucketedDataset(local=str(out), seed=1)
    other, same = BucketedDataset(local=str(compressed)), BucketedDataset(local=str(compressed))
    loaders = [BucketedDataLoader(d) for d in (train, again, other, same)]
    ids = [[], [], [], []]
    for batches in zip(*loaders, strict=True):
        for place, batch in zip(ids, batches, strict=True):
            place += batch.meta.sample_ids.tolist()
    assert ids[0] == ids[1] and ids[2] == ids[3]
    assert sorted(ids[0]) == sorted(ids[2]) == list(range(400))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc to see what is mapped")
def test_no_shared_memory_segment_is_mapped(out, compressed):
    def segments():
        names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        return {name for name in names if name.startswith("/dev/shm/") and "/sem." not in name}

    before = segments()  # stock datasets of other tests
    for folder in (out, compressed):
        loader = BucketedDataLoader(BucketedDataset(local=str(folder)), num_workers=2)
        next(iter(loader))
        assert segments() <= before
        loader.close()


def test_worlds_that_change_between_construction_and_iteration(out, monkeypatch):
    dataset = BucketedDataset(local=str(out))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="made on rank 0 of 1 and is iterated on rank 1 of 2"):
        iter(BucketedDataLoader(dataset))


# --- imports ------------------------------------------------------------------------------------------


def test_planner_and_state_import_neither_torch_nor_streaming():
    program = (
        "import sys, loader\n"
        "import loader.plan, loader.state, loader.walk, loader.progress, loader.world, loader.prefetch\n"
        "import loader.passes, loader.cache\n"
        "print([m for m in ('torch', 'streaming', 'pyarrow') if m in sys.modules])\n"
        "print(sorted(loader.__all__), loader.BucketedDataset.__module__, 'torch' in sys.modules)\n"
        "try:\n    loader.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[]",
        "['Batch', 'BatchMeta', 'BucketedDataLoader', 'BucketedDataset'] loader.dataset True",
        "module 'loader' has no attribute 'nothing'",
    ]


def test_a_stream_shows_files_whole_or_not_at_all(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote/a").write_bytes(b"x" * 1000)
    stream = AtomicStream(
        remote=str(tmp_path / "remote"),
        local=str(tmp_path / "local"),
        download_retry=1,
        download_timeout=5,
        keep_zip=False,
    )
    assert Path(stream._download_file("a")).read_bytes() == b"x" * 1000
    with pytest.raises(DownloadError, match=r"b could not be downloaded from .*remote"):
        stream._download_file("b")
    assert [p.name for p in (tmp_path / "local").iterdir()] == ["a"]


def test_what_a_worker_gets_does_not_grow_with_the_samples(tmp_path):
    sizes = []
    for num_samples in (200, 20_000):
        out = make_dataset(tmp_path / str(num_samples), [4] * num_samples, token_budget=64, num_buckets=1)
        dataset = BucketedDataset(local=str(out))
        assert len(pickle.dumps(dataset)) > 4 * num_samples  # the dataset itself knows all lengths
        sizes.append(len(pickle.dumps(dataset.reader())))
    assert sizes[1] < sizes[0] + 1000 and sizes[0] < 20_000


def test_memory_does_not_grow_over_epochs(tmp_path):
    out = make_dataset(tmp_path, [4] * 20_000, token_budget=256, num_buckets=1)
    loader = BucketedDataLoader(BucketedDataset(local=str(out), block_samples=4000))
    used = []
    for _ in range(8):
        for _ in loader:
            pass
        used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert max(used[3:]) - used[2] < 8 << 20
