"""Prediction beside fact: calibrate this machine, predict the step of each scheme, then take steps and compare.

Emulated compute: stages that sleep, so that ranks may share cores; what is predicted are messages, wake-ups and how
they add up. Real compute: a GPT on two ranks, from its layers as calibrated.

What a model cannot know is that the machine becomes slower or faster after the calibration, as a virtual one does when
its neighbours wake, within seconds. So each round calibrates anew, and of real compute each step is followed by one of
a pacemaker: data parallelism, in which there is nothing of a pipeline to predict. What its step takes over what is
predicted for it is the pace, by which a prediction is multiplied: it says how well schemes are told from each other.
The tables also have what is predicted without.

  python scripts/bench/predict.py --emulated 4 8 --real 2 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _bench import emulate, run_ours, save, show, spread

from chimera_mpi.config import load
from chimera_mpi.errors import InputError
from chimera_mpi.predict.estimate import Choice, Estimate, estimate
from chimera_mpi.predict.machine import Compute, Machine, Point, read_machine
from chimera_mpi.predict.work import LayerWork, Work
from chimera_mpi.schedule import SCHEMES, STREAMS, build
from chimera_mpi.work import work_of

SHARES = (1.0, 0.5, 0.25)  # of a stage's time: what schemes with smaller stages sleep
NS = 1e9  # an emulated stage's FLOPs are its nanoseconds
MODEL = (
    *("model=gpt", "layers=8", "hidden=256", "heads=4", "vocabulary=2048", "positions=128", "sequence_length=128"),
    *("tied=false", "micro_batch_size=4", "threads=1"),
)
WARM_UP = 2


def main() -> None:
    args = arguments()
    if args.rank:
        asked = json.loads(args.rank)
        real_on_a_rank(**asked["real"]) if "real" in asked else emulated_on_a_rank(asked)
        return
    rows: dict[tuple[str, int, int, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", flush=True)
            for kind, depths, take in (("emulated", args.emulated, emulated), ("real", args.real, real)):
                for depth in depths:
                    for row in take(args, depth, Path(folder)):
                        key = kind, depth, row.pop("micro_batches"), row.pop("scheme")
                        rows[key].append(row)
                        share = row["predicted_s"] / row["measured_s"]
                        said = "{} D={} N={} {}".format(*key)
                        told = f"predicted {share:.3f} of it, with a pace of {row['pace']:.2f}"
                        print(f"{said}: {1e3 * row['measured_s']:.1f} ms, {told}", flush=True)
    summary = []
    for kind, depth, micro_batches in dict.fromkeys(key[:3] for key in rows):
        block = {key[3]: found for key, found in rows.items() if key[:3] == (kind, depth, micro_batches)}
        heads = ["scheme", "measured ms", "spread %", "pace", "predicted / measured", "without pace", "Eq. 1"]
        show(f"{kind}, D = {depth}, N = {micro_batches}", heads, [line(name, found) for name, found in block.items()])
        errors = [abs(ratio(found, "predicted_s") - 1) for found in block.values()]
        print(f"off by {100 * median(errors):.1f} % typically, by {100 * max(errors):.1f} % at most\n")
        summary += [
            {"kind": kind, "depth": depth, "micro_batches": micro_batches, "scheme": name, "rounds": found}
            for name, found in block.items()
        ]
    save(args.json, {"rows": summary})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulated", type=int, nargs="*", default=[4, 8], metavar="D", help="depths that sleep")
    parser.add_argument("--real", type=int, nargs="*", default=[2], metavar="D", help="depths that compute")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a scheme in a round")
    parser.add_argument("--micro-batches", type=int, default=0, metavar="N", help="default: 4 of real compute, else D")
    parser.add_argument("--schemes", nargs="+", default=[s for s in SCHEMES if s not in STREAMS])
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of an emulated stage; I and W take as long")
    parser.add_argument("--message-kb", type=int, default=64, help="of an emulated stage, in KiB")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="of the real model")
    parser.add_argument("--quick", action="store_true", help="calibrate with a few points only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # what a rank that sleeps is to measure
    return parser.parse_args()


def line(scheme: str, found: Sequence[dict[str, float]]) -> tuple[object, ...]:
    measured = [row["measured_s"] for row in found]
    return (
        scheme,
        f"{1e3 * median(measured):.2f}",
        f"{100 * spread(measured):.1f}",
        f"{median(row['pace'] for row in found):.2f}",
        ratio(found, "predicted_s"),
        ratio(found, "calibrated_s"),
        ratio(found, "formula_s"),
    )


def ratio(found: Sequence[dict[str, float]], what: str) -> float:
    """To what was measured in the same round."""
    return median(row[what] / row["measured_s"] for row in found)


def calibrated(ranks: int, folder: Path, quick: bool, *keys: str) -> Machine:
    path = folder / "machine.toml"
    options = ["--quick"] if quick else []
    run_ours(ranks, "-m", "chimera_mpi", "calibrate", *keys, "-o", str(path), *options)
    return read_machine(path)


# ---- real compute ------------------------------------------------------------------------------------------------


def real(args: argparse.Namespace, depth: int, folder: Path) -> Iterator[dict[str, Any]]:
    keys, micro_batches = [*MODEL, *args.keys], args.micro_batches or 4
    config = load("gpt-tiny", keys)
    work = work_of(config)
    machine = calibrated(depth, folder, args.quick, "gpt-tiny", *keys)
    asked = {"schemes": args.schemes, "keys": keys, "micro_batches": micro_batches, "steps": args.steps}
    told = json.loads(run_ours(depth, __file__, "--rank", json.dumps({"real": asked})))
    alike = Choice("1f1b", 1, depth, config.micro_batch_size, pacemakers(micro_batches, depth), sync=config.sync)
    pace_s = estimate(work, machine, alike).step_s
    for scheme, steps in told.items():
        if isinstance(steps, str):
            print(f"left out: {steps}")
            continue
        choice = Choice(scheme, depth, 1, config.micro_batch_size, micro_batches, sync=config.sync)
        predicted = estimate(work, machine, choice)
        paces = [of_pacemaker_s / pace_s for _, of_pacemaker_s in steps]
        # A pair of steps tells what one would have taken at the pace of the calibration.
        steady_s = median(seconds / pace for (seconds, _), pace in zip(steps, paces, strict=True))
        measured_s = median(seconds for seconds, _ in steps)
        yield row(scheme, micro_batches, measured_s, predicted, measured_s / steady_s)


def real_on_a_rank(schemes: Sequence[str], keys: Sequence[str], micro_batches: int, steps: int) -> None:
    """Steps of each scheme in turns with those of the pacemaker; rank 0 prints their seconds as JSON."""
    import torch
    from mpi4py import MPI

    from chimera_mpi.host import keep_freed_memory
    from chimera_mpi.models.emulated import Sleeper
    from chimera_mpi.runtime.grid import Grid
    from chimera_mpi.runtime.rehearsal import StepTimer
    from chimera_mpi.runtime.tensors import token_specs
    from chimera_mpi.tasks import random_corpus
    from chimera_mpi.train import Part, plan_job, read_micro_batch

    torch.set_num_threads(1)
    keep_freed_memory()
    world = MPI.COMM_WORLD
    grids = [Grid(world, 1)]
    timer = StepTimer(grids[0].world, grids[0].node.patience, Sleeper())

    def stepping(scheme: str, depth: int, number: int) -> Callable[[int], float]:
        shape = [f"scheme={scheme}", f"depth={depth}", f"micro_batches={number}"]
        config = load("gpt-tiny", [*keys, *shape])
        job = plan_job(config, world.size)
        grids.append(Grid(world, depth))
        part = Part(grids[-1], job, lambda size: token_specs(size, config.sequence_length), guards=True)
        batches = job.task.batches(random_corpus(config, job.task), job.sizes, config.seed)
        feed = part.feed(partial(read_micro_batch, batches), 0)
        return lambda step: timer.time(lambda: part.pipeline.run(feed, step, lambda _: 1e-4)).seconds

    pace = stepping("1f1b", 1, pacemakers(micro_batches, world.size))
    found: dict[str, list[tuple[float, float]] | str] = {}
    for scheme in schemes:
        try:
            step = stepping(scheme, world.size, micro_batches)
        except InputError as error:
            found[scheme] = str(error)
            continue
        found[scheme] = [(step(number), pace(number)) for number in range(WARM_UP + steps)][WARM_UP:]
    if world.rank == 0:
        print(json.dumps(found))
    for grid in grids:
        grid.close()


def pacemakers(micro_batches: int, ranks: int) -> int:
    """The micro-batches of each rank that make up the same mini-batch without a pipeline."""
    return max(micro_batches // ranks, 1)


def row(scheme: str, micro_batches: int, measured_s: float, predicted: Estimate, pace: float = 1.0) -> dict[str, Any]:
    """`pace`: how many times as long as predicted a step without a pipeline takes."""
    return {
        "scheme": scheme,
        "micro_batches": micro_batches,
        "pace": pace,
        "measured_s": measured_s,
        "predicted_s": pace * predicted.step_s,
        "calibrated_s": predicted.step_s,
        "formula_s": pace * predicted.formula_s,
    }


# ---- emulated compute --------------------------------------------------------------------------------------------


def emulated(args: argparse.Namespace, depth: int, folder: Path) -> list[dict[str, Any]]:
    micro_batches = args.micro_batches or depth
    machine = calibrated(depth, folder, args.quick, "gpt-tiny", "micro_batch_size=1")
    asked = {"forward_ms": args.forward_ms, "message_bytes": 1024 * args.message_kb}
    told = json.loads(run_ours(depth, __file__, "--rank", json.dumps(asked)))
    compute = Compute(tuple(Point(**point) for point in told["points"]), told["slowdown"])
    machine = replace(machine, compute=compute)
    found = emulate(
        depth,
        *("--schemes", *args.schemes, "--micro-batches", micro_batches, "--message-bytes", asked["message_bytes"]),
        *("--forward-ms", args.forward_ms, "--input-ms", args.forward_ms, "--repeat", args.steps),
    )
    return [
        row(
            each["scheme"],
            micro_batches,
            each["median_s"],
            asleep(machine, each["scheme"], depth, micro_batches, asked),
        )
        for each in found["rows"]
    ]


def asleep(machine: Machine, scheme: str, depth: int, micro_batches: int, asked: dict[str, Any]) -> Estimate:
    """The estimate for stages that sleep: layers that are one stage each."""
    stages = build(scheme, depth, micro_batches).stages
    flops = asked["forward_ms"] * 1e-3 * NS * depth / stages
    layer = LayerWork("stage", 1, flops, 2 * flops, 0, asked["message_bytes"], 0, 0, 0)
    work = Work((layer,) * stages, parameter_bytes=4, master_bytes=0, gradient_bytes=4, state_bytes=0)
    return estimate(work, machine, Choice(scheme, depth, 1, 1, micro_batches))


def emulated_on_a_rank(asked: dict[str, Any]) -> None:
    """What stages that sleep for so long take, all ranks at once, and in a pipeline; rank 0 prints it as JSON."""
    import torch
    from mpi4py import MPI

    from chimera_mpi.models.emulated import Durations, Sleeper, emulated
    from chimera_mpi.runtime.calibration import Effort, Ensemble, Manner, read_layers, read_slowdown
    from chimera_mpi.runtime.grid import Grid
    from chimera_mpi.runtime.optimizer import Recipe
    from chimera_mpi.runtime.rehearsal import number_and_target
    from chimera_mpi.runtime.staging import Direct

    torch.set_num_threads(1)
    grid = Grid(MPI.COMM_WORLD, 1)
    once = Effort((1,), (), (), trips=1, repeats=5, point_s=1.0, longest_s=10.0)
    ensemble = Ensemble(grid.world, grid.node.patience, once)
    manner = Manner(torch.float32, Recipe("sgd", weight_decay=0.0), False, Direct())
    points = []
    for share in SHARES:
        seconds = asked["forward_ms"] * 1e-3 * share
        model = emulated(2, Durations(seconds, seconds, seconds), asked["message_bytes"], Sleeper())
        readings, _ = read_layers(ensemble, model, ["stage", "last"], lambda _: number_and_target(0), manner)
        _, samples, *times, _ = readings[0]
        names = ("forward_s", "backward_s", "input_s", "weight_s")
        sizes = {"forward_flops": seconds * NS, "backward_flops": 2 * seconds * NS}
        points.append(asdict(Point("stage", samples, **dict(zip(names, times, strict=True)), **sizes)))
    seconds = asked["forward_ms"] * 1e-3
    ranks, kinds = MPI.COMM_WORLD.size, ["stage"] * (MPI.COMM_WORLD.size - 1) + ["last"]
    model = emulated(ranks, Durations(seconds, seconds, seconds), asked["message_bytes"], Sleeper())
    readings, _ = read_layers(ensemble, model, kinds, lambda _: number_and_target(0), manner)
    slowdown = read_slowdown(ensemble, model, kinds, readings, lambda _: number_and_target(0), manner)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"points": points, "slowdown": slowdown}))
    grid.close()


if __name__ == "__main__":
    main()
