"""The tables of the Chimera paper (Li and Hoefler 2021, Section 4), predicted and published.

Five numbers of Piz Daint are fitted to the paper's throughputs, once for all schemes, both models and all node counts:
how much slower layers are in a training step than measured alone; the seconds per byte of messages and sums; what an
all-reduce costs more beyond a group of 384 nodes of the Aries network; the share of an all-reduce's time that it takes
from its worker; and what it takes the asynchronous schemes to put a micro-batch's version of a weight in place. Given
by the paper are the seconds of a layer, the models and the configurations. The rest was chosen, with the same points in
view: which five numbers there are, one bandwidth for messages and sums, groups of 384 nodes, sums that do not queue,
latency, optimizer, and the usable memory. So errors on these points tell how well the model fits, not how well it
predicts.

  python scripts/bench/paper_tables.py                 the machine that comes with the package against the paper
  python scripts/bench/paper_tables.py --fit --write chimera_mpi/machines/piz-daint.toml
  python scripts/bench/paper_tables.py --hold-out 2048 what a fit to the other points says of those on 2048 nodes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _bench import save, show

from chimera_mpi.predict import Link
from chimera_mpi.predict.estimate import Choice, costs_of, estimate, schedule_of, stepped
from chimera_mpi.predict.footprint import memory_of
from chimera_mpi.predict.machine import (
    AllReduce,
    Compute,
    Level,
    Machine,
    Optimizer,
    Overlap,
    Point,
    read_machine,
    write_machine,
)
from chimera_mpi.predict.partition import Cuts
from chimera_mpi.predict.work import LayerWork, Transformer, Work, bert_work, gpt_work
from chimera_mpi.schedule import STREAMS
from chimera_mpi.schedule.timing import makespan

# ---- what the paper reports


class Run(NamedTuple):
    """A measured throughput, and that of the paper's own model where it gives one; in samples per second."""

    model: str
    scheme: str
    nodes: int
    mini_batch: int
    depth: int
    micro_batch_size: int
    published_per_s: float
    recompute: bool = False
    model_per_s: float | None = None
    sync: str = "eager_opt"


BEST = [  # of each scheme
    Run("Bert-48", "chimera", 32, 512, 4, 8, 173.3, model_per_s=169.7),
    Run("Bert-48", "dapple", 32, 512, 4, 4, 150.1),
    Run("Bert-48", "gpipe", 32, 512, 4, 4, 135.2, recompute=True),
    Run("Bert-48", "gems", 32, 512, 4, 32, 73.1),
    Run("Bert-48", "pipedream_2bw", 32, 512, 4, 16, 153.3, recompute=True),
    Run("Bert-48", "pipedream", 32, 48, 8, 12, 89.8),
    *(Run("GPT-2", "chimera", nodes, nodes, 32, 1, y) for nodes, y in ((512, 140.0), (1024, 278.7), (2048, 512.4))),
    *(Run("GPT-2", "dapple", nodes, nodes, 16, 1, y, True) for nodes, y in ((512, 98.5), (1024, 192.9), (2048, 371.1))),
    *(Run("GPT-2", "gpipe", nodes, nodes, 8, 1, y, True) for nodes, y in ((512, 100.7), (1024, 179.3), (2048, 360.6))),
    *(Run("GPT-2", "gems", nodes, nodes, 8, 2, y) for nodes, y in ((512, 55.8), (1024, 111.2), (2048, 219.3))),
    *(
        Run("GPT-2", "pipedream_2bw", nodes, nodes, 16, 1, y, True)
        for nodes, y in ((512, 128.3), (1024, 231.5), (2048, 438.9))
    ),
    *(
        Run("GPT-2", "pipedream", nodes, nodes // 4, 8, 2, y, True)
        for nodes, y in ((512, 77.5), (1024, 148.8), (2048, 254.7))
    ),
]
OTHER_SHAPES = [  # of Chimera
    Run("Bert-48", "chimera", 32, 512, 16, 16, 129.2, model_per_s=142.0),
    Run("Bert-48", "chimera", 32, 512, 8, 16, 157.2, model_per_s=163.4),
    Run("Bert-48", "chimera", 32, 512, 2, 4, 134.0, model_per_s=123.7),
    Run("GPT-2", "chimera", 512, 512, 64, 1, 116.7, model_per_s=128.3),
    Run("GPT-2", "chimera", 512, 512, 16, 1, 129.2, recompute=True, model_per_s=138.8),
    Run("GPT-2", "chimera", 512, 512, 8, 1, 142.5, recompute=True, model_per_s=141.6),
]
RUNS = [*BEST, *OTHER_SHAPES]
LARGEST = 2048  # nodes, of the headline speed-ups
SPEED_UPS = {"pipedream_2bw": 1.16, "dapple": 1.38, "gpipe": 1.42, "pipedream": 2.01, "gems": 2.34}
EAGER_GAINS = {16: 1.01, 32: 1.09, 64: 1.11}  # of eager_opt over eager, Bert-48, D = 4, B = 8, by nodes

# Seconds of one layer of Bert-48 on a P100, forward and backward, by micro-batch size. Its input needed no gradient
# there, so the backward lacks one product of three: that of queries, keys and values with their matrix.
LAYER_S = {
    1: (1.16e-3, 1.67e-3),
    2: (1.51e-3, 2.56e-3),
    4: (2.52e-3, 4.20e-3),
    8: (4.50e-3, 7.65e-3),
    16: (9.30e-3, 14.88e-3),
    32: (16.1e-3, 27.0e-3),
    64: (31.1e-3, 52.9e-3),
}


@cache
def work_of(model: str) -> Work:
    """As the paper trains it: fp32, AdamW, dropout, attention that is not fused, an output matrix of its own.

    A layer of Bert-48 keeps 11 MiB a sample, as measured there. GPT-2's GELU, in its tanh form and not fused, keeps
    three tensors more, as wide as its input.
    """
    how = {"tied": False, "dropout": 0.1, "device": "cuda", "fused": False}
    if model == "Bert-48":
        shape = {"layers": 48, "hidden": 1024, "heads": 16, "vocabulary": 30522, "positions": 512}
        return _keeping(bert_work(Transformer(**shape, sequence_length=128, **how)), lambda block: 11 * 2**20)
    layers = {"GPT-2": 64, "GPT-2-32": 32}[model]
    shape = {"layers": layers, "hidden": 1280, "heads": 20, "vocabulary": 50257, "positions": 1024}
    plain = gpt_work(Transformer(**shape, sequence_length=632, **how))
    return _keeping(plain, lambda block: block.activation_bytes + 3 * 4 * block.output_bytes)


def _keeping(work: Work, kept: Callable[[LayerWork], float]) -> Work:
    """The same with other bytes that a block keeps for its backward."""
    layers = (replace(layer, activation_bytes=kept(layer)) if layer.kind == "block" else layer for layer in work.layers)
    return replace(work, layers=tuple(layers))


def even_blocks(work: Work, depth: int) -> Cuts:
    """As the paper cuts: blocks shared out evenly, the embedding with the first and the head with the last of them."""
    blocks = len(work.layers) - 2
    points = [0, *(1 + blocks * stage // depth for stage in range(1, depth)), len(work.layers)]
    return [range(start, end) for start, end in pairwise(points)]


def choice_of(run: Run) -> Choice:
    width = run.nodes // run.depth
    return Choice(
        {"dapple": "1f1b"}.get(run.scheme, run.scheme),
        run.depth,
        width,
        run.micro_batch_size,
        run.mini_batch // (width * run.micro_batch_size),
        "stage" if run.recompute else "none",
        sync=run.sync,
        cuts=even_blocks(work_of(run.model), run.depth),
    )


# ---- the machine


class Fitted(NamedTuple):
    """What is fitted: the bandwidth of messages and of sums alike, the latency of sums between groups of nodes."""

    slowdown: float = 1.5
    s_per_byte: float = 4e-10
    beyond_group_s: float = 0.15
    version_s_per_parameter: float = 2e-10
    allreduce_busy: float = 0.2


# Of tensors as they are counted here, on a P100 of 16 GB; CUDA, the holes in PyTorch's pools and staging take the rest.
# With this the paper's configurations fit, but for PipeDream's of GPT-2 by 0.5 GB, and where it recomputes, it has to.
USABLE_BYTES = 12e9
LATENCY_S = 1e-4  # of TCP on Aries, and of staging
ADAMW_S = 1.5e-10  # of a parameter: ten passes over tensors of 4 bytes, 76 in all, at 500 GB/s
GROUP = 384  # nodes of two cabinets of a Cray XC50, joined without optical cables


def piz_daint(fitted: Fitted) -> Machine:
    """One P100 a node, Gloo over Aries, tensors staged through the host's memory."""
    block = work_of("Bert-48").layers[1]
    unneeded = 2 * 3 * 1024**2 * 128  # FLOPs of the one product that a layer whose input needs no gradient leaves out
    points = tuple(
        Point(
            "block",
            samples,
            forward_s,
            backward_s,
            forward_flops=block.forward_flops,
            backward_flops=block.backward_flops - unneeded,
            output_bytes=block.output_bytes,
        )
        for samples, (forward_s, backward_s) in LAYER_S.items()
    )
    return Machine(
        name="piz-daint",
        source="Li and Hoefler 2021: a layer of Bert-48 on a P100; the rest fitted by scripts/bench/paper_tables.py",
        memory_bytes=USABLE_BYTES,
        workers_per_node=1,
        device="cuda",
        compute=Compute(points, round_to(fitted.slowdown)),
        link=Link(LATENCY_S, round_to(fitted.s_per_byte)),
        allreduce=AllReduce(
            switch=Level(LATENCY_S, round_to(fitted.s_per_byte)),
            above=Level(round_to(fitted.beyond_group_s), round_to(fitted.s_per_byte)),
            nodes_per_switch=GROUP,
        ),
        # A ring of Gloo's does not fill the wire: two of one worker's at a time take no longer than one.
        overlap=Overlap(round_to(fitted.allreduce_busy), allreduces_queue=False),
        optimizer=Optimizer(1e-3, ADAMW_S, round_to(fitted.version_s_per_parameter)),
    )


def round_to(number: float, digits: int = 4) -> float:
    return float(f"{number:.{digits}g}")


@cache
def schedules_of(choice_key: tuple) -> object:
    return stepped(Choice(*choice_key))


def step_s(machine: Machine, run: Run) -> float:
    """Predicted by simulation."""
    choice = choice_of(run)
    schedules = schedules_of((choice.scheme, choice.depth, 1, 1, choice.micro_batches, "none", (), choice.sync))
    costs = costs_of(work_of(run.model), machine, choice, schedules[-1][1])
    return sum(weight * makespan(schedule, costs) for weight, schedule in schedules)


def predicted_per_s(machine: Machine, run: Run) -> float:
    return run.mini_batch / step_s(machine, run)


# ---- the fit


def errors(machine: Machine) -> np.ndarray:
    """Logarithms of predicted over published: throughputs, then Chimera's speed-ups, then what eager_opt gains."""
    per_s = {run: predicted_per_s(machine, run) for run in RUNS}
    ups = speed_ups(per_s)
    gains = (gain(machine, nodes) / published for nodes, published in EAGER_GAINS.items())
    return np.log(
        [
            *(per_s[run] / run.published_per_s for run in RUNS),
            *(ups[scheme] / published for scheme, published in SPEED_UPS.items()),
            *gains,
        ]
    )


def gain(machine: Machine, nodes: int) -> float:
    run = Run("Bert-48", "chimera", nodes, 16 * nodes, 4, 8, 0)
    return step_s(machine, run._replace(sync="eager")) / step_s(machine, run)


SMALL, LARGE = 0.03, 0.1  # errors below the one hardly count, those above the other much
WEIGHTS = np.array([1.0] * len(RUNS) + [8.0] * len(SPEED_UPS) + [1.0] * len(EAGER_GAINS))


def weights_without(nodes: int) -> np.ndarray:
    """The weights where nothing counts that was measured on so many nodes."""
    held = [of == nodes for of in (*(run.nodes for run in RUNS), *[LARGEST] * len(SPEED_UPS), *EAGER_GAINS)]
    return np.where(held, 0.0, WEIGHTS)


def loss(found: np.ndarray, weights: np.ndarray = WEIGHTS) -> float:
    return float(np.sum(weights * (np.sqrt(found**2 + SMALL**2) + 0.1 * (found / LARGE) ** 4)))


def fit(start: Fitted = Fitted(), rounds: int = 12, weights: np.ndarray = WEIGHTS) -> Fitted:
    """The numbers with the least loss: Gauss and Newton's way, damped, in logarithms, errors weighed by the loss."""
    at = np.log(start)
    found = errors(piz_daint(Fitted(*np.exp(at))))
    damping = 0.1
    for _ in range(rounds):
        counts = weights * (1 / np.sqrt(found**2 + SMALL**2) + 0.4 * found**2 / LARGE**4)
        slopes = np.stack([_slope(at, which, found) for which in range(len(at))], axis=1)
        normal = slopes.T @ (counts[:, None] * slopes)
        for _ in range(4):
            damped = normal + damping * np.diag(np.diag(normal) + 1e-3)
            moved = at + np.clip(np.linalg.solve(damped, -slopes.T @ (counts * found)), -0.5, 0.5)
            moved[-1] = min(moved[-1], 0)  # a share
            after = errors(piz_daint(Fitted(*np.exp(moved))))
            if loss(after, weights) < loss(found, weights):
                break
            damping *= 5
        else:
            break
        done = loss(found, weights) - loss(after, weights) < 1e-4
        at, found, damping = moved, after, damping / 5
        if done:
            break
    return Fitted(*(round_to(number) for number in np.exp(at)))


def _slope(at: np.ndarray, which: int, found: np.ndarray, by: float = 0.05) -> np.ndarray:
    moved = at.copy()
    moved[which] += by
    return (errors(piz_daint(Fitted(*np.exp(moved)))) - found) / by


# ---- the best of each scheme

DEPTHS = (4, 8, 16, 32)
SIZES = (1, 2, 4, 8, 12, 16, 32)


@dataclass(frozen=True)
class Best:
    """The configuration that is predicted to be best, beside the published one."""

    published: Run
    found: Run
    found_per_s: float
    published_per_s: float  # of the published configuration, predicted

    @property
    def agrees(self) -> bool:
        return configuration(self.found) == configuration(self.published)


def best_of(machine: Machine, run: Run) -> Best:
    """Of the published configuration, and all depths and micro-batch sizes, with recomputation or not, that fit."""
    rivals = {rival: predicted_per_s(machine, rival) for rival in [run, *_rivals(machine, run)]}
    found = max(rivals, key=rivals.__getitem__)
    return Best(run, found, rivals[found], predicted_per_s(machine, run))


def _rivals(machine: Machine, run: Run) -> Iterator[Run]:
    for depth, size, recompute in product(DEPTHS, SIZES, (False, True)):
        rival = run._replace(depth=depth, micro_batch_size=size, recompute=recompute)
        if run.nodes % depth == 0 and is_possible(rival) and needed_bytes(rival) <= machine.memory_bytes:
            yield rival


def is_possible(run: Run) -> bool:
    """PipeDream's mini-batch is one micro-batch of each group, 2BW's at least as many as the pipeline is deep."""
    micro_batches, rest = divmod(run.mini_batch, run.micro_batch_size * (run.nodes // run.depth))
    if rest or not micro_batches:
        return False
    return {"pipedream": micro_batches == 1, "pipedream_2bw": micro_batches >= run.depth}.get(run.scheme, True)


@cache
def needed_bytes(run: Run) -> float:
    """Of the fullest worker."""
    choice = choice_of(run)
    schedule = stepped(choice)[-1][1] if choice.scheme in STREAMS else schedule_of(choice)
    memory = memory_of(work_of(run.model), choice, schedule)
    return max(worker.total_bytes for worker in memory)


def configuration(run: Run) -> str:
    return f"D{run.depth} B{run.micro_batch_size}{' R' if run.recompute else ''}"


# ---- what is printed


def main() -> None:
    args = arguments()
    if args.hold_out:
        save(args.json, hold_out(args.hold_out))
        return
    fitted = fit() if args.fit else None
    machine = piz_daint(fitted) if fitted else read_machine(args.machine)
    if fitted:
        show_fitted(fitted)
    found = tables(machine)
    if args.write:
        write_machine(machine, args.write)
        print(f"wrote {args.write}")
    save(args.json, found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="piz-daint", help="name or file; default: piz-daint")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--fit", action="store_true", help="fit the machine anew")
    nodes = sorted({run.nodes for run in RUNS})
    held = "fit without the points on so many nodes, and predict them"
    what.add_argument("--hold-out", type=int, choices=nodes, metavar="NODES", help=held)
    parser.add_argument("--write", type=Path, metavar="FILE", help="the machine, as a machine file")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.hold_out and args.write:
        parser.error("--write is for a machine fitted to all points: leave out --hold-out")
    return args


def show_fitted(fitted: Fitted) -> None:
    show("fitted", ["what", "value"], [(name, f"{number:.4g}") for name, number in fitted._asdict().items()])


def hold_out(nodes: int) -> dict[str, object]:
    """Fit to what other numbers of nodes have done, print what that says of these; the figures, for JSON."""
    fitted = fit(weights=weights_without(nodes))
    show_fitted(fitted)
    machine = piz_daint(fitted)
    per_s = {run: predicted_per_s(machine, run) for run in RUNS}
    held = [run for run in RUNS if run.nodes == nodes]
    show(
        f"Throughput on {nodes} nodes, which the fit has not seen, samples per second",
        ["", "configuration", "published", "predicted", "error %"],
        [(f"{run.model} {run.scheme}", configuration(run), *beside(run, per_s[run])) for run in held],
    )
    print_errors(f"{len(held)} throughputs that the fit has not seen", held, per_s)
    if nodes == LARGEST:
        show_speed_ups(speed_ups(per_s))
    for group in groups():
        if group[1] == nodes:
            print_order(group, per_s)
    return {"fitted": fitted._asdict(), "runs": [{**run._asdict(), "predicted_per_s": per_s[run]} for run in held]}


def tables(machine: Machine, configurations: bool = True) -> dict[str, object]:
    """Print all; the figures, for JSON."""
    per_s = {run: predicted_per_s(machine, run) for run in RUNS}
    show(
        "Throughput of the best configuration of each scheme, samples per second",
        ["", "nodes", "configuration", "published", "predicted", "error %"],
        [(f"{run.model} {run.scheme}", run.nodes, configuration(run), *beside(run, per_s[run])) for run in BEST],
    )
    models = [run for run in RUNS if run.model_per_s]
    show(
        "Chimera, measured beside models: the paper's own, Eq. 1 here, and the simulation",
        ["", "nodes", "configuration", "measured", "paper's model", "Eq. 1", "simulated"],
        [
            (
                run.model,
                run.nodes,
                configuration(run),
                *map(tenth, (run.published_per_s, run.model_per_s, by_formula(machine, run), per_s[run])),
            )
            for run in models
        ],
    )
    ups = speed_ups(per_s)
    show_speed_ups(ups)
    weak = {nodes: next(per_s[r] for r in BEST if (r.scheme, r.nodes) == ("chimera", nodes)) for nodes in (512, 2048)}
    print(
        f"Chimera's weak scaling, 512 to 2048 nodes: published 91.4 %, predicted {25 * weak[2048] / weak[512]:.1f} %\n"
    )
    show(
        "What eager_opt gains over eager, Bert-48, D4 B8",
        ["nodes", "published", "predicted"],
        [(str(nodes), published, gain(machine, nodes)) for nodes, published in EAGER_GAINS.items()],
    )
    if configurations:
        print_best(machine)
    off = print_errors(f"{len(RUNS)} throughputs, those of the fit", RUNS, per_s)
    for group in groups():
        print_order(group, per_s)
    return {
        "runs": [{**run._asdict(), "predicted_per_s": per_s[run]} for run in RUNS],
        "speed_ups": ups,
        "median_error": float(np.median(off)),
        "largest_error": float(max(off)),
    }


def speed_ups(per_s: dict[Run, float]) -> dict[str, float]:
    """Of Chimera over the others."""
    largest = {run.scheme: per_s[run] for run in BEST if run.nodes == LARGEST}
    return {scheme: largest["chimera"] / largest[scheme] for scheme in SPEED_UPS}


def show_speed_ups(ups: dict[str, float]) -> None:
    show(
        f"Speed-up of Chimera, GPT-2 on {LARGEST} nodes",
        ["over", "published", "predicted", "error %"],
        [(scheme, SPEED_UPS[scheme], up, percent(up / SPEED_UPS[scheme])) for scheme, up in ups.items()],
    )


def print_errors(what: str, runs: Sequence[Run], per_s: dict[Run, float]) -> list[float]:
    """Their errors, as shares."""
    off = [abs(per_s[run] / run.published_per_s - 1) for run in runs]
    print(f"{what}: median error {100 * np.median(off):.1f} %, largest {100 * max(off):.1f} %")
    return off


def print_order(group: tuple[str, int], per_s: dict[Run, float]) -> None:
    model, nodes = group
    published, predicted = order_of(group, per_s)
    same = "the same" if published == predicted else f"predicted {' > '.join(predicted)}"
    print(f"order of schemes, {model} on {nodes} nodes: {' > '.join(published)}; {same}")


def print_best(machine: Machine) -> None:
    best = [best_of(machine, run) for run in BEST if run.nodes <= 512]
    show(
        "The best configuration of each scheme, of those that fit into the memory as it is modelled here",
        ["", "nodes", "published", "needs GB", "predicted", "best here", "needs GB", "predicted"],
        [
            (
                f"{of.published.model} {of.published.scheme}",
                of.published.nodes,
                configuration(of.published),
                tenth(needed_bytes(of.published) / 1e9),
                tenth(of.published_per_s),
                "the same" if of.agrees else configuration(of.found),
                tenth(needed_bytes(of.found) / 1e9),
                tenth(of.found_per_s),
            )
            for of in best
        ],
    )


def groups() -> list[tuple[str, int]]:
    return list(dict.fromkeys((run.model, run.nodes) for run in BEST))


def order_of(group: tuple[str, int], per_s: dict[Run, float]) -> tuple[list[str], list[str]]:
    """The schemes from the fastest down, as published and as predicted."""
    runs = [run for run in BEST if (run.model, run.nodes) == group]
    return tuple(
        [run.scheme for run in sorted(runs, key=key, reverse=True)]
        for key in (lambda run: run.published_per_s, per_s.__getitem__)
    )


def by_formula(machine: Machine, run: Run) -> float:
    return run.mini_batch / estimate(work_of(run.model), machine, choice_of(run)).formula_s


def beside(run: Run, per_s: float) -> Sequence[str]:
    return tenth(run.published_per_s), tenth(per_s), percent(per_s / run.published_per_s)


def tenth(number: float) -> str:
    return f"{number:.1f}"


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


if __name__ == "__main__":
    main()
