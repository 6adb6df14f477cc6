"""What each rank of the distributed tests runs: several scenarios in one launch, results as JSON.

torchrun --nproc-per-node=2 tests/ranks.py DATASET RESULTS
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from loader import BucketedDataLoader, BucketedDataset
from shardgen.errors import UserError


def taken(loader: BucketedDataLoader, num_steps: int | None = None) -> list[list[int]]:
    """Ids of each batch up to the end of so many steps, with a collective per step that needs all ranks."""
    ids, steps = [], 0
    for batch in loader:
        ids.append(batch.meta.sample_ids.tolist())
        if batch.meta.last_micro_step:
            total = torch.tensor([batch.meta.step, len(ids)])
            dist.all_reduce(total)
            assert total.tolist() == [
                batch.meta.step * dist.get_world_size(),
                len(ids) * dist.get_world_size(),
            ]
            steps += 1
            if steps == num_steps:
                break
    return ids


def main(out: str, results: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = BucketedDataset(local=out, accumulate=2, seed=11, block_samples=700)
    record: dict[str, object] = {"rank": rank, "seen": [dataset.world.rank, dataset.world.num_ranks]}

    loader = BucketedDataLoader(dataset, num_workers=2, persistent_workers=True)
    record["lengths"], record["epochs"] = [], []
    for _ in range(3):
        record["lengths"].append(len(loader))
        record["epochs"].append(taken(loader))

    loader.set_epoch(0)
    record["first_12_steps"] = taken(loader, 12)
    record["state"] = loader.state_dict()
    loader.close()
    record["resumed"] = {}
    for num_workers in (0, 2):
        resumed = BucketedDataLoader(dataset, num_workers=num_workers)
        resumed.load_state_dict(record["state"])
        record["resumed"][num_workers] = taken(resumed)
        resumed.close()

    os.environ["RANK"] = str(rank + 1)
    try:
        BucketedDataset(local=out)
    except UserError as error:
        record["disagreement"] = str(error)
    (results / f"{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
