"""Downloads: from a directory and from S3, with a cache limit, and when things go wrong."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import make_dataset
from object_store import ObjectStore

from loader import BucketedDataLoader, BucketedDataset
from loader.source import LOCAL, PREPARING, REMOTE, DownloadError
from shardgen.errors import UserError

NUM_SAMPLES = 600
LENGTHS = np.random.default_rng(2).integers(1, 121, NUM_SAMPLES)
OPTIONS = {"token_budget": 400, "num_buckets": 3, "shard_size": 1 << 12}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("plain"), LENGTHS, **OPTIONS)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("zip"), LENGTHS, compression="zstd:3", **OPTIONS)


@pytest.fixture(params=["plain", "compressed"])
def remote(request, tmp_path):
    """A copy of a dataset that the test may damage."""
    return shutil.copytree(request.getfixturevalue(request.param), tmp_path / "remote")


@pytest.fixture(autouse=True)
def own_temp(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    monkeypatch.setattr("tempfile.tempdir", None)


def cached(remote, local, **kwargs):
    kwargs.setdefault("download_retry", 1)
    kwargs.setdefault("download_timeout", 20)
    return BucketedDataset(remote=str(remote), local=str(local), **kwargs)


def delivered(dataset, **kwargs):
    loader = BucketedDataLoader(dataset, **kwargs)
    ids = [batch.meta.sample_ids.tolist() for batch in loader]
    loader.close()
    return ids


def used_bytes(folder):
    total = 0
    for path in Path(folder).rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # evicted while we look
    return total


def flat(batches):
    return sorted(i for ids in batches for i in ids)


# --- a directory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{}, {"num_workers": 2}, {"prefetch": 0}], ids=str)
def test_remote_directory(remote, tmp_path, way):
    local = tmp_path / "local"
    expected = delivered(BucketedDataset(local=str(remote)))
    dataset = cached(f"file://{remote}", local)
    assert len(BucketedDataLoader(dataset)) == len(expected)
    assert not list(local.rglob("*.mds"))  # lengths need no shard
    assert delivered(dataset, **way) == expected
    raw = sorted(p.relative_to(local) for p in local.rglob("*.mds"))
    assert len(raw) == dataset.num_shards == len({*raw})
    assert not list(local.rglob("*.zstd")) and not list(local.rglob("*.part"))
    assert dataset.cache_usage == used_bytes(local)
    # All is there now: the remote may go.
    shutil.rmtree(remote)
    assert delivered(cached(remote, local), **way) == expected


def test_keep_zip_keeps_it(compressed, tmp_path):
    dataset = cached(compressed, tmp_path / "local", keep_zip=True)
    delivered(dataset)
    assert len(list((tmp_path / "local").rglob("*.zstd"))) == dataset.num_shards
    assert dataset.cache_usage == used_bytes(tmp_path / "local")


def test_without_local_the_cache_lies_under_temp(plain, own_temp):
    dataset = BucketedDataset(remote=str(plain))
    assert flat(delivered(dataset)) == list(range(NUM_SAMPLES))
    assert len(list(own_temp.rglob("*.mds"))) == dataset.num_shards
    again = BucketedDataset(remote=str(plain))
    assert again.cache_usage == dataset.cache_usage


def test_what_is_no_remote(tmp_path):
    with pytest.raises(UserError, match=r"is not a dataset, or cannot be reached: no manifest\.json"):
        cached(tmp_path / "nowhere", tmp_path / "local")


def test_it_downloads_ahead(plain, tmp_path):
    dataset = cached(plain, tmp_path / "local", predownload_batches=10_000)
    loader = BucketedDataLoader(dataset, prefetch=1)
    running = iter(loader)
    next(running)
    end = time.monotonic() + 20
    while len(list((tmp_path / "local").rglob("*.mds"))) < dataset.num_shards:
        assert time.monotonic() < end, "nothing is downloaded ahead"
        time.sleep(0.01)
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("loader-")]


# --- cache limit --------------------------------------------------------------------------------------


def limited(remote, local, limit, **kwargs):
    return cached(remote, local, cache_limit=limit, block_samples=150, **kwargs)


@pytest.mark.parametrize("way", [{}, {"num_workers": 2}], ids=str)
def test_cache_limit_holds_at_every_batch(remote, tmp_path, way):
    local = tmp_path / "local"
    with pytest.raises(UserError, match="does not hold one block") as refused:
        limited(remote, local, "1kb")
    least = int(str(refused.value).partition("give at least ")[2].partition(",")[0])
    everything = used_bytes(remote)
    with pytest.raises(UserError, match=f"give at least {least}"):
        limited(remote, local, least - 1)
    dataset = limited(remote, local, least)
    if dataset.shards[0].compression is None:
        assert least < 0.8 * everything
    expected = [delivered(BucketedDataset(local=str(remote), block_samples=150))]
    loader = BucketedDataLoader(dataset, **way)
    most, ids = 0, []
    for batch in loader:
        with dataset._marker.lock:  # else one file may go and another come while we count
            most = max(most, used_bytes(local))
        ids.append(batch.meta.sample_ids.tolist())
        assert loader.metrics()["shards_resident"] <= dataset.num_shards
    assert ids == expected[0]
    assert most <= least
    assert flat([b.meta.sample_ids.tolist() for b in loader]) == list(range(NUM_SAMPLES))
    loader.close()
    states = set(dataset._shard_states.numpy().tolist())
    assert states <= {LOCAL, REMOTE}
    # Every shard exists at the remote, and only there are all of them.
    assert used_bytes(remote) == everything
    assert dataset.cache_usage == used_bytes(local)


def test_evicting_by_hand_and_reading_again(plain, tmp_path):
    dataset = cached(plain, tmp_path / "local")
    first = dataset[0]["input_ids"].tolist()
    dataset.evict_shard(0)
    assert not Path(dataset.raw_path(0)).exists()
    assert dataset[0]["input_ids"].tolist() == first
    before = dataset.cache_usage
    dataset.evict_coldest_shard()
    assert dataset.cache_usage == before - dataset.shards[0].get_raw_size()


def test_another_limit_or_dataset_in_the_same_cache_is_refused(plain, tmp_path):
    dataset = cached(plain, tmp_path / "local")
    with pytest.raises(UserError, match="in use with cache_limit None, not"):
        cached(plain, tmp_path / "local", cache_limit="100mb")
    same = cached(plain, tmp_path / "local")
    assert delivered(same) == delivered(dataset)
    del dataset, same
    assert cached(plain, tmp_path / "local", cache_limit="100mb").cache_limit == 100 << 20


# --- things that go wrong -----------------------------------------------------------------------------


def shard_file(remote):
    return sorted([*remote.rglob("*.mds"), *remote.rglob("*.zstd")])[1]


def test_a_failed_download_is_told_and_tried_again(remote, tmp_path):
    victim = shard_file(remote)
    kept = victim.read_bytes()
    expected = delivered(BucketedDataset(local=str(remote)))
    damage = [None, kept[:-50]]
    if victim.suffix == ".zstd":
        damage = [None, b"no zstd" * 30]
    for content in damage:
        victim.unlink() if content is None else victim.write_bytes(content)
        dataset = cached(remote, tmp_path / "local")
        loader = BucketedDataLoader(dataset)
        with pytest.raises(Exception, match=r"shard\.00001\.mds") as error:
            list(loader)
        assert not isinstance(error.value, TimeoutError)
        assert PREPARING not in dataset._shard_states.numpy().tolist()
        victim.write_bytes(kept)
        loader.set_epoch(0)
        assert [b.meta.sample_ids.tolist() for b in loader] == expected
        loader.close()
        shutil.rmtree(tmp_path / "local")
        del dataset, loader


def test_a_wrong_hash_is_found_and_not_kept(remote, tmp_path):
    victim = shard_file(remote)
    kept = victim.read_bytes()
    victim.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    dataset = cached(remote, tmp_path / "local", validate_hash="xxh64")
    for _ in range(2):  # the damaged file must not pass as present the second time
        with pytest.raises(DownloadError, match="Checksum failure"):
            delivered(dataset)
    victim.write_bytes(kept)
    assert flat(delivered(dataset)) == list(range(NUM_SAMPLES))


def test_a_shard_whose_preparing_process_died_is_taken_over(remote, tmp_path):
    dataset = cached(remote, tmp_path / "local")

    def child():
        assert dataset._claim(2)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert dataset._shard_states[2] == PREPARING
    assert flat(delivered(dataset)) == list(range(NUM_SAMPLES))


def test_a_shard_that_another_process_prepares_is_waited_for(plain, tmp_path):
    dataset = cached(plain, tmp_path / "local")
    context = multiprocessing.get_context("fork")
    claimed, go_on = context.Event(), context.Event()

    def child():
        assert dataset._claim(2)
        claimed.set()
        go_on.wait(30)
        dataset._prepare_claimed(2)

    process = context.Process(target=child)
    process.start()
    assert claimed.wait(30)
    dataset.prepare_shard(2, blocking=False)
    assert not Path(dataset.raw_path(2)).exists()
    waiting = threading.Thread(target=dataset.prepare_shard, args=(2,))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(30)
    assert Path(dataset.raw_path(2)).exists() and dataset._shard_states[2] == LOCAL
    process.join(30)


def test_waiting_for_another_process_has_an_end(plain, tmp_path, monkeypatch):
    dataset = cached(plain, tmp_path / "local")
    assert dataset._claim(0)  # by this very process, which lives
    monkeypatch.setattr(dataset, "_patience", lambda stream: 0.1)
    with pytest.raises(TimeoutError, match=r"waited 0 s for another process to prepare .*shard\.00000\.mds"):
        dataset.prepare_shard(0)


def test_leftovers_of_killed_downloads_are_removed(plain, tmp_path):
    local = tmp_path / "local"
    expected = delivered(cached(plain, local))
    dead = multiprocessing.get_context("fork").Process(target=os.getpid)
    dead.start()
    dead.join()
    shard = sorted(local.rglob("*.mds"))[0]
    half = shard.read_bytes()[: shard.stat().st_size // 2]
    shard.write_bytes(half)  # as a backend that writes in place would leave it
    (shard.parent / f"{shard.name}.{dead.pid}-1.part").write_bytes(half)
    (shard.parent / f"{shard.name}.{dead.pid}-1.part.8Fa3bC2d").write_bytes(half)
    living = shard.parent / f"{shard.name}.{os.getpid()}-1.part"
    living.write_bytes(half)
    dataset = cached(plain, local)
    assert not shard.exists() and dataset._shard_states.numpy().tolist().count(REMOTE) == 1
    assert [p.name for p in local.rglob("*.part*")] == [living.name]
    living.unlink()
    assert delivered(dataset) == expected


# --- S3 -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store():
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def s3(store, monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT_URL", store.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield store
    store.proxy.set("pass")


@pytest.mark.parametrize("name", ["plain", "compressed"])
@pytest.mark.parametrize("way", [{}, {"num_workers": 1}], ids=str)
def test_s3(s3, request, tmp_path, name, way):
    folder = request.getfixturevalue(name)
    address = s3.upload(folder, name)
    before = s3.proxy.bytes_down
    ids = delivered(cached(address, tmp_path / "local"), **way)
    assert ids == delivered(BucketedDataset(local=str(folder)))
    size = used_bytes(folder) - 3 * len((folder / "bucket-00/index.json").read_bytes())
    assert size * 0.9 < s3.proxy.bytes_down - before < size * 1.5 + 100_000  # nothing comes twice


def test_s3_with_a_cache_limit(s3, plain, tmp_path):
    address = s3.upload(plain, "plain")
    dataset = limited(address, tmp_path / "local", used_bytes(plain))
    assert flat(delivered(dataset)) == list(range(NUM_SAMPLES))


def test_s3_that_stops_answering_for_a_while(s3, plain, tmp_path):
    address = s3.upload(plain, "plain")
    dataset = cached(address, tmp_path / "local", predownload_batches=1)
    loader = BucketedDataLoader(dataset)
    ids = []
    for number, batch in enumerate(loader):
        ids.append(batch.meta.sample_ids.tolist())
        if number == 1:
            s3.proxy.set("stall")
            threading.Timer(1.0, s3.proxy.set, ("pass",)).start()
    assert ids == delivered(BucketedDataset(local=str(plain)))


def test_s3_that_dies_is_a_clear_error_and_a_resume_goes_on(s3, plain, tmp_path):
    address = s3.upload(plain, "plain")
    expected = delivered(BucketedDataset(local=str(plain)))
    dataset = cached(address, tmp_path / "local", predownload_batches=0, download_timeout=3)
    loader = BucketedDataLoader(dataset, prefetch=1)
    ids = []
    with pytest.raises(
        DownloadError, match=r"shard\.\d+\.mds could not be downloaded from s3://corpus/plain"
    ):
        for batch in loader:
            ids.append(batch.meta.sample_ids.tolist())
            s3.proxy.set("cut")
    state = loader.state_dict()
    loader.close()
    s3.proxy.set("pass")
    loader = BucketedDataLoader(cached(address, tmp_path / "local"))
    loader.load_state_dict(state)
    assert ids + [b.meta.sample_ids.tolist() for b in loader] == expected
    with pytest.raises(UserError, match=r"no manifest\.json"):
        cached("s3://corpus/nothing", tmp_path / "other")
