"""Measure what batches cost, and fit the cost model that build, optimize, simulate and the loader take.

    python scripts/calibrate.py scripts/examples/measured_step.py:step --token-budget 4096 --longest 1024 \
        --out cost.json --epoch SHARDS
    python -m shardgen simulate SHARDS --cost-model cost.json

The step is ``module:function`` or ``file.py:function``. The function takes ``(batch_size, length)``, runs one
whole training step on such a batch (any token ids) and returns when the device is done. What it returns, if
anything, is taken for the seconds it took (CUDA events, say); otherwise we measure.

Shapes are visited in rounds, in another order each time, and the median counts: a machine that slows down for
a while slows all shapes alike. Shapes that were not fitted are measured in the same rounds and printed beside
their prediction; with ``--epoch`` so is a real epoch of a built dataset, batch by batch.
"""

import argparse
import importlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.cost import CostModel
from shardgen.errors import UserError

Step = Callable[[int, int], Any]
Shape = tuple[int, int]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def load_step(name: str) -> Step:
    """The function that ``module:function`` or ``file.py:function`` names."""
    where, _, function = name.rpartition(":")
    if not where:
        raise UserError(f"step {name!r} names no function: write module:function or file.py:function")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise UserError(f"step {name!r}: there is no file {where}")
        sys.path.insert(0, str(Path(where).resolve().parent))
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(where)
    if not callable(getattr(module, function, None)):
        raise UserError(f"step {name!r}: {where} has no function {function}")
    return getattr(module, function)


def timed(step: Step, shape: Shape, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one step."""
    began = clock()
    told = step(*shape)
    seconds = clock() - began
    return seconds if told is None else float(told)


def grid(token_budget: int, longest: int) -> list[Shape]:
    """Shapes to fit: short and long rows, in full, quarter and sixteenth batches."""
    shapes = {
        (max(1, token_budget // (part * length)), length)
        for length in (max(1, longest // 16), max(1, longest // 4), longest // 2 or 1, longest)
        for part in (1, 4, 16)
    }
    return sorted(shapes)


def between(token_budget: int, longest: int) -> list[Shape]:
    """Shapes to hold out: lengths and fillings that lie between those of the grid."""
    return [
        (max(1, int(token_budget * filling) // length), length)
        for length, filling in (
            (max(1, longest // 10), 0.97),
            (max(1, longest // 6), 0.6),
            (max(1, longest * 2 // 5), 0.95),
            (max(1, longest * 3 // 4), 0.5),
            (max(1, longest * 9 // 10), 1.0),
        )
    ]


def measure(
    step: Step,
    shapes: Sequence[Shape],
    *,
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    epoch: Sequence[Shape] = (),
) -> tuple[NDArray[np.float64], float]:
    """Median seconds of each shape, float64, shape (len(shapes),), and the seconds of all of ``epoch``.

    The epoch's batches are run in order, a part of them in each round.
    """
    for shape in list(shapes) * warm_up:
        step(*shape)
    order = random.Random(0)
    seconds = np.zeros((rounds, len(shapes)))
    parts = np.array_split(np.arange(len(epoch)), rounds)
    epoch_seconds = 0.0
    for r, part in enumerate(parts):
        for i in order.sample(range(len(shapes)), len(shapes)):
            seconds[r, i] = timed(step, shapes[i], clock)
        epoch_seconds += sum(timed(step, epoch[i], clock) for i in part.tolist())
    return np.median(seconds, axis=0), epoch_seconds


def epoch_shapes(local: str, token_budget: int) -> list[Shape]:
    """Shapes of the batches of one rank's epoch, in order."""
    from loader import BucketedDataset

    dataset = BucketedDataset(local=local, token_budget=token_budget)
    return [
        shape
        for run in dataset.plans.runs(dataset.plans.at(0), dataset.plan_options)
        for shape in zip(
            run.shown.batch_num_rows.tolist(), run.shown.batch_padded_length.tolist(), strict=True
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fit a cost model from measured steps.")
    parser.add_argument("step", help="module:function or file.py:function")
    parser.add_argument("--token-budget", type=int, required=True, help="padded tokens of a batch")
    parser.add_argument("--longest", type=int, required=True, help="longest sample")
    parser.add_argument("--out", type=Path, default=Path("cost.json"))
    parser.add_argument("--epoch", metavar="DIR", help="a built dataset, of which an epoch is run as well")
    parser.add_argument("--epoch-batches", type=int, help="only so many batches of it, from its start")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2, help="runs of each shape that do not count")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: of this process, on a machine others use"
    )
    options = parser.parse_args(arguments)
    for name in ("token_budget", "longest", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is below 1")
    if options.longest > options.token_budget:
        parser.error(f"--longest {options.longest} is above --token-budget {options.token_budget}")

    step = load_step(options.step)
    fitted_shapes = grid(options.token_budget, options.longest)
    held_out = [s for s in between(options.token_budget, options.longest) if s not in fitted_shapes]
    epoch = epoch_shapes(options.epoch, options.token_budget) if options.epoch else []
    epoch = epoch[: options.epoch_batches]
    shapes = fitted_shapes + held_out
    seconds, epoch_seconds = measure(
        step,
        shapes,
        rounds=options.rounds,
        warm_up=options.warm_up,
        clock=CLOCKS[options.clock],
        epoch=epoch,
    )
    rows, length = np.array(shapes).T
    known = len(fitted_shapes)
    fitted = CostModel.fit(rows[:known], length[:known], seconds[:known])
    predicted = fitted.seconds(rows, length)

    print(f"{'rows':>6} {'length':>7} {'measured':>11} {'predicted':>11} {'error':>7}")
    for i, shape in enumerate(shapes):
        if i == known:
            print("held out:")
        times = f"{seconds[i] * 1e3:8.2f} ms {predicted[i] * 1e3:8.2f} ms"
        print(f"{shape[0]:6d} {shape[1]:7d} {times} {predicted[i] / seconds[i] - 1:+7.1%}")
    if epoch:
        expected = float(fitted.seconds(*np.array(epoch).T).sum())
        new = sum(shape not in fitted_shapes for shape in epoch)
        print(
            f"a real epoch, {len(epoch)} batches (shapes not fitted: {new}): "
            f"measured {epoch_seconds:.2f} s, predicted {expected:.2f} s, {expected / epoch_seconds - 1:+.1%}"
        )
    options.out.write_text(json.dumps(fitted.model.to_json()) + "\n")
    print(
        f"{1 / fitted.seconds_per_token:,.0f} token-equivalents/s with {json.dumps(fitted.model.to_json())}"
    )
    print(f"wrote {options.out}: pass it as --cost-model, or CostModel.load it for the loader")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
