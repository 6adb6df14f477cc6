"""What a build under construction has done, so that a killed one can go on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from shardgen import __version__
from shardgen.errors import UserError
from shardgen.options import BuildOptions
from shardgen.prepare import Prepared
from shardgen.tasks import Fragments, ShardInfo, TaskResult

DIRECTORY = ".progress"


def identity(prepared: Prepared, options: BuildOptions) -> dict[str, str]:
    """What must not change between a killed build and its continuation, by the name a person knows it by."""
    lengths = hashlib.sha256(prepared.rows.lengths.tobytes())
    for name in sorted(prepared.rows.items):
        lengths.update(prepared.rows.items[name].tobytes())
    cuts = [(task.first_partition, task.last_partition, len(task.rows)) for task in prepared.tasks]
    recorded = options.recorded() | {
        "boundaries": prepared.buckets.boundaries,
        "columns": prepared.format.config(),
    }
    files = [(os.path.abspath(source.path), source.version) for source in prepared.sources]
    parts: dict[str, object] = {"input files": files, "options": recorded, "partitions": cuts}
    digests = {
        name: hashlib.sha256(json.dumps(v, default=str).encode()).hexdigest() for name, v in parts.items()
    }
    return {"release": __version__, "lengths": lengths.hexdigest(), **digests}


class Journal:
    """Finished tasks and shards of the build in ``directory``; every entry is whole or absent.

    Attributes:
        is_of_another_build: :meth:`begin` found the work of another build, which is not ours to remove.
    """

    def __init__(self, directory: str) -> None:
        self._directory = os.path.join(directory, DIRECTORY)
        self.is_of_another_build = False

    def begin(self, now: Mapping[str, str]) -> bool:
        """Start, or go on with an earlier run of the same build.

        Returns:
            Whether there is an earlier run.

        Raises:
            UserError: The earlier run was of something else; names what changed.
        """
        os.makedirs(self._directory, exist_ok=True)
        path = os.path.join(self._directory, "identity.json")
        try:
            with open(path, encoding="utf-8") as file:
                before = json.load(file)
        except FileNotFoundError:
            self._write("identity.json", json.dumps(dict(now)).encode())
            return False
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            self.is_of_another_build = True
            raise UserError(
                f"the killed build in {os.path.dirname(self._directory)} cannot be resumed, for its "
                f"{' and '.join(changed)} changed since: use --overwrite to start anew"
            )
        return True

    def _write(self, name: str, data: bytes) -> None:
        path = os.path.join(self._directory, name)
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
        os.replace(f"{path}.tmp", path)

    def save_task(self, result: TaskResult) -> None:
        path = os.path.join(self._directory, f"task-{result.number}.npz")
        found = result.fragments
        with open(f"{path}.tmp", "wb") as file:
            np.savez(
                file,
                shards=found.shards,
                offsets=found.offsets,
                num_bytes=found.num_bytes,
                hashes=found.hashes,
                loss_tokens=result.loss_tokens,
                first_token_loss=result.first_token_loss,
            )
        os.replace(f"{path}.tmp", path)

    def tasks(self) -> dict[int, TaskResult]:
        """Finished tasks by number."""
        found = {}
        for name in os.listdir(self._directory):
            if name.startswith("task-") and name.endswith(".npz"):
                number = int(name[5:-4])
                with np.load(os.path.join(self._directory, name)) as arrays:
                    found[number] = TaskResult(
                        number=number,
                        fragments=Fragments(
                            **{key: arrays[key] for key in ("shards", "offsets", "num_bytes", "hashes")}
                        ),
                        loss_tokens=arrays["loss_tokens"],
                        first_token_loss=arrays["first_token_loss"],
                    )
        return found

    def save_shard(self, number: int, info: ShardInfo) -> None:
        self._write(f"shard-{number}.json", json.dumps(asdict(info)).encode())

    def shards(self) -> dict[int, ShardInfo]:
        """Finished shards by number."""
        found = {}
        for name in os.listdir(self._directory):
            if name.startswith("shard-") and name.endswith(".json"):
                with open(os.path.join(self._directory, name), encoding="utf-8") as file:
                    found[int(name[6:-5])] = ShardInfo(**json.load(file))
        return found

    def count_tasks(self) -> int:
        """Finished tasks."""
        try:
            return sum(name.endswith(".npz") for name in os.listdir(self._directory))
        except FileNotFoundError:
            return 0

    def remove(self) -> None:
        shutil.rmtree(self._directory)
