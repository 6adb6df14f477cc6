"""What a build says of its samples, against pyarrow's own conversion."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import write_source

from loader.built import read_corpus, read_samples
from shardgen.build import build
from shardgen.errors import UserError
from shardgen.manifest import Manifest
from shardgen.options import BuildOptions

LENGTHS = np.random.default_rng(6).integers(1, 30, 300)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A build with a loss mask; every third token has no loss, and every second sample's first one."""
    folder = tmp_path_factory.mktemp("masked")
    masks = [
        [int((row + i) % 3 > 0 and not (i == 0 and row % 2)) for i in range(n)]
        for row, n in enumerate(LENGTHS)
    ]
    write_source(folder / "source.parquet", LENGTHS, loss_mask=pa.array(masks, pa.list_(pa.uint8())))
    options = BuildOptions(token_budget=100, num_buckets=3, loss_mask_column="loss_mask", columns=("row",))
    build([str(folder / "source.parquet")], str(folder / "out"), options)
    return folder / "out", masks


@pytest.mark.parametrize("labels", ["causal", "tokens", None])
def test_lengths_and_loss_tokens_against_the_source(masked, labels):
    out, masks = masked
    manifest = Manifest.load(out)
    sizes = np.array([b.num_samples for b in manifest.buckets if b.num_shards], np.int64)
    assert {b.num_shards for b in manifest.buckets} <= {0, 1}
    corpus = read_corpus(manifest, sizes, lambda directory: str(out / directory / "samples.parquet"), labels)
    tables = [pq.read_table(out / b.directory / "samples.parquet") for b in manifest.buckets if b.directory]
    rows = np.concatenate([t["source_row"].to_numpy() for t in tables])
    assert corpus.lengths.tolist() == LENGTHS[rows].tolist()
    if labels is None:
        assert corpus.loss_tokens is None
    else:
        skipped = 1 if labels == "causal" else 0
        assert corpus.loss_tokens.tolist() == [sum(masks[row][skipped:]) for row in rows.tolist()]


def test_it_imports_neither_pandas_nor_compute(masked, python):
    out, _ = masked
    program = (
        "import sys, numpy as np\n"
        "from loader.built import read_corpus\n"
        "from shardgen.manifest import Manifest\n"
        f"out = {str(out)!r}\n"
        "manifest = Manifest.load(out)\n"
        "sizes = np.array([b.num_samples for b in manifest.buckets if b.num_shards])\n"
        "read_corpus(manifest, sizes, lambda d: f'{out}/{d}/samples.parquet', 'causal')\n"
        "print([m for m in ('pandas', 'pyarrow.compute', 'pyarrow.dataset', 'torch') if m in sys.modules])\n"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "samples.parquet").write_text("no")
    with pytest.raises(UserError, match=r"samples\.parquet cannot be read.*build the dataset again"):
        read_samples(str(tmp_path / "samples.parquet"), ["length"])
