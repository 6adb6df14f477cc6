"""What each node of a job downloads, with and without lanes.

    python scripts/lanes.py [--nodes 2] [--ranks-per-node 2] [--samples 8000] [--json]

Real processes, one cache directory per node and one remote. With ``num_canonical_nodes`` equal to the number
of nodes, a node reads the shards of its own lane and downloads about its share of the set; the batches of a
step do not depend on how many machines there are.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 1000


def build_dataset(folder: Path, num_samples: int) -> Path:
    """A dataset in many small shards."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardgen.build import build
    from shardgen.options import BuildOptions

    lengths = 1 + (np.random.default_rng(0).beta(0.8, 3.0, num_samples) * (LONGEST - 1)).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = pa.array(np.arange(offsets[-1], dtype=np.int32) % 1000)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), tokens)})
    pq.write_table(table, folder / "source.parquet")
    options = BuildOptions(token_budget=4096, num_buckets=4, shard_size=1 << 15)
    build([str(folder / "source.parquet")], str(folder / "out"), options)
    return folder / "out"


def rank_main(rank: int, shape: tuple[int, int, int], out: str, folder: str, report: Connection) -> None:
    """One rank's epoch; sends the sample ids of every step."""
    from loader import BucketedDataLoader, BucketedDataset

    nodes, per_node, lanes = shape
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(nodes * per_node), LOCAL_WORLD_SIZE=str(per_node))
    dataset = BucketedDataset(
        remote=out,
        local=f"{folder}/node-{rank // per_node}",
        num_canonical_nodes=lanes,
        accumulate=2,
        lookahead=8,
    )
    steps: dict[int, list[int]] = {}
    for batch in BucketedDataLoader(dataset):
        steps.setdefault(batch.meta.step, []).extend(batch.meta.sample_ids.tolist())
    report.send(steps)


def run(context: Any, out: Path, nodes: int, per_node: int, lanes: int) -> dict[str, Any]:
    """One epoch on simulated nodes: bytes of shards that each downloaded, and the samples of every step."""
    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        receivers, processes = [], []
        for rank in range(nodes * per_node):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, (nodes, per_node, lanes), str(out), folder, sender)
            processes.append(context.Process(target=rank_main, args=arguments))
            receivers.append(receiver)
            processes[-1].start()
            sender.close()
        steps: dict[int, list[int]] = {}
        for receiver in receivers:
            for step, ids in receiver.recv().items():
                steps.setdefault(step, []).extend(ids)
        for process in processes:
            process.join()
        downloaded = [
            sum(path.stat().st_size for path in Path(folder, f"node-{node}").rglob("*.mds"))
            for node in range(nodes)
        ]
    return {
        "nodes": nodes,
        "ranks_per_node": per_node,
        "num_canonical_nodes": lanes,
        "downloaded_bytes": downloaded,
        "steps": [sorted(steps[step]) for step in sorted(steps)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What each node downloads, with and without lanes.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    nodes, per_node = arguments.nodes, arguments.ranks_per_node
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loader.dataloader"])
    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        out = build_dataset(Path(folder), arguments.samples)
        total = sum(path.stat().st_size for path in out.rglob("*.mds"))
        shapes = [(nodes, per_node, 1), (nodes, per_node, nodes), (1, nodes * per_node, nodes)]
        results = [run(context, out, *shape) for shape in shapes]
    for result in results:
        shares = ", ".join(f"{b:,} bytes ({b / total:.0%})" for b in result["downloaded_bytes"])
        delivered = sorted(i for step in result["steps"] for i in step)
        print(
            f"{result['nodes']} nodes x {result['ranks_per_node']} ranks, "
            f"{result['num_canonical_nodes']} lanes: each node downloaded {shares}; {len(delivered):,} "
            f"samples in {len(result['steps'])} steps"
        )
    same = results[1]["steps"] == results[2]["steps"]
    print(f"with lanes, a step's samples {'do not depend' if same else 'DEPEND'} on the number of nodes")
    if arguments.json:
        print(json.dumps({"total_bytes": total, "num_samples": arguments.samples, "runs": results}))


if __name__ == "__main__":
    main()
