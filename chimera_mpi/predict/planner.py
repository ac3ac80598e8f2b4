"""Choose how to train a model on a machine: scheme, depth, width, micro-batch, recomputation, partition and the rest.

All that can be chosen is laid out, each choice with a bound below which its step cannot be (see `bounds`). The search
takes the lowest bound first, looks whether memory is enough, simulates, and passes over what by its bound cannot be
shown any more: so it finds what simulating everything would. The replicas of a pipeline group do alike, so one group
is looked at, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from math import inf, sqrt
from typing import Any, NamedTuple, cast

from ..errors import InputError, counted
from ..schedule import SCHEMES, STREAMS, Schedule, UnfitDepth, build, check_compatible, options_of, paused_collector
from ..schedule.list_scheduler import peaks
from ..schedule.schemes import LIVE
from ..schedule.timing import makespan
from ..schedule.weave import MOST_CELLS
from .bounds import Post, least_steady_step_s, least_step_s, posts
from .costs import Costs
from .estimate import Choice, Estimate, costs_of, estimate, memory_in, stepped
from .footprint import Buffers, Memory, memory_of
from .machine import Machine
from .partition import Cuts, Recompute, cut_at, cut_quickly, cut_uniformly
from .performance import Weighted
from .work import LayerWork, Work

Options = tuple[tuple[str, int | str], ...]
Pipes = tuple[tuple[int, ...], ...]

SYNCHRONOUS = tuple(scheme for scheme in SCHEMES if scheme not in STREAMS)
RIVAL = "1f1b"  # what a choice is measured by
MOST_PAIRS = 4  # of Chimera's pipelines; each has a copy of all weights


@dataclass(frozen=True)
class Space:
    """What may be chosen: by default any depth that divides the workers, and all that keeps the update of one process.

    "layers" recomputes a few layers at a time. "balanced" shares out the layers' seconds evenly to the workers, and
    "between" goes half the way there: what is even in time may be uneven in memory.
    """

    schemes: tuple[str, ...] = SYNCHRONOUS
    depths: tuple[int, ...] | None = None
    largest_micro_batch: int | None = None
    micro_batch_size: int | None = None
    recompute: tuple[str | int, ...] = ("none", "stage", "layer", "layers")
    syncs: tuple[str, ...] = ("eager_opt", "eager", "lazy")
    partitions: tuple[str, ...] = ("uniform", "balanced", "between")
    sharded: bool = False
    fp16: bool = False
    buffers: Buffers = Buffers()


class Family(NamedTuple):
    """Schedules that differ in their number of micro-batches only."""

    scheme: str
    depth: int
    options: Options


class Batch(NamedTuple):
    """Samples of the largest micro-batch, and how many micro-batches a pipeline group has in a step."""

    size: int
    number: int


class Unfit(NamedTuple):
    """A choice whose fullest worker lacks so many bytes."""

    estimate: Estimate
    lacking_bytes: float


@dataclass(frozen=True)
class Outcome:
    """What a search has found, the fastest first: of each scheme, depth and micro-batch size the best choice.

    `rival` is the best 1F1B that fits. `unfit` would be faster than the best and lacks the least memory of such.
    """

    mini_batch: int
    best: tuple[Estimate, ...]
    rival: Estimate | None
    unfit: Unfit | None
    considered: int
    simulated: int
    left_out: tuple[str, ...] = ()  # why schemes that were asked for are in no choice

    def samples_per_s(self, found: Estimate) -> float:
        """Of the mini-batch as it is: where it is not shared out evenly, not all micro-batches are of the same size."""
        return self.mini_batch / found.step_s


Tell = Callable[[int, int, float], None]  # choices that are settled, all of them, the best step so far in seconds


def tell_nobody(settled: int, of: int, best_s: float) -> None:
    pass


@paused_collector()
def search(
    work: Work,
    machine: Machine,
    workers: int,
    mini_batch: int,
    space: Space = Space(),
    keep: int = 10,
    tell: Tell = tell_nobody,
) -> Outcome:
    """The `keep` best choices for a step of `mini_batch` samples on `workers` workers.

    Raises InputError, with the numbers, if there is no choice at all, or none that fits into the machine's memory.
    """
    bench = _Bench(work, machine)
    candidates = sorted(_candidates(bench, space, workers, mini_batch), key=lambda candidate: candidate.bound_s)
    if not candidates:
        raise InputError(_no_choice(bench, space, workers, mini_batch))
    ranking, unfit, simulated = _Ranking(keep), [], 0
    for settled, candidate in enumerate(candidates):
        tell(settled, len(candidates), ranking.best_s)
        if ranking.wants(candidate):
            lacking = bench.lacking_bytes(candidate.choice)
            if lacking > 0:
                unfit.append(candidate)
            else:
                ranking.add(candidate, bench.step_s(candidate.choice))
                simulated += 1
    if not ranking.best:
        raise InputError(_nothing_fits(bench, unfit, workers, mini_batch))
    if not ranking.best_s:
        raise InputError(f"a step on {machine.name} takes 0 s: give its compute.points a time")
    return Outcome(
        mini_batch,
        best=tuple(estimate(work, machine, choice) for choice in ranking.best),
        rival=estimate(work, machine, ranking.rival) if ranking.rival else None,
        unfit=_nearest_unfit(bench, unfit, ranking.best_s),
        considered=len(candidates),
        simulated=simulated,
        left_out=_left_out(bench, space, {candidate.choice.scheme for candidate in candidates}, workers),
    )


def choices(work: Work, machine: Machine, workers: int, mini_batch: int, space: Space = Space()) -> list[Choice]:
    """All that there is to choose from, whether it fits or not."""
    return [candidate.choice for candidate in _candidates(_Bench(work, machine), space, workers, mini_batch)]


class _Candidate(NamedTuple):
    """A choice that is not simulated yet."""

    bound_s: float
    choice: Choice

    @property
    def row(self) -> tuple[str, int, int]:
        """Of the candidates of one row only the best is shown."""
        return self.choice.scheme, self.choice.depth, self.choice.micro_batch_size


class _Ranking:
    """The best steps so far, and what a candidate must be faster than to be shown."""

    def __init__(self, keep: int):
        self._keep = keep
        self._rows: dict[tuple[str, int, int], tuple[float, Choice]] = {}
        self._ranked: list[tuple[float, Choice]] = []
        self._last_s = self._rival_s = self.best_s = inf

    @property
    def best(self) -> list[Choice]:
        return [choice for _, choice in self._ranked[: self._keep]]

    @property
    def rival(self) -> Choice | None:
        return next((choice for _, choice in self._ranked if choice.scheme == RIVAL), None)

    def wants(self, candidate: _Candidate) -> bool:
        """Whether a step of the candidate's bound would change what is shown."""
        last_s = max(self._last_s, self._rival_s) if candidate.choice.scheme == RIVAL else self._last_s
        return candidate.bound_s < min(last_s, self._rows.get(candidate.row, (inf,))[0])

    def add(self, candidate: _Candidate, step_s: float) -> None:
        if step_s >= self._rows.get(candidate.row, (inf,))[0]:
            return
        self._rows[candidate.row] = step_s, candidate.choice
        self._ranked = sorted(self._rows.values(), key=lambda row: row[0])
        self.best_s = self._ranked[0][0]
        self._last_s = self._ranked[self._keep - 1][0] if len(self._ranked) >= self._keep else inf
        self._rival_s = next((s for s, choice in self._ranked if choice.scheme == RIVAL), inf)


# ---- what there is to choose from


def _candidates(bench: _Bench, space: Space, workers: int, mini_batch: int) -> Iterator[_Candidate]:
    for family in _families(bench, space, workers, mini_batch):
        width = workers // family.depth
        stages, replicas = bench.placement(family).stages, width * len(bench.placement(family).pipes)
        syncs = space.syncs if replicas > 1 and family.scheme not in STREAMS else space.syncs[:1]
        for batch in batches(family.scheme, mini_batch, width, space):
            if not _has_sense(family, batch, stages):
                continue
            for recompute in _recomputations(space.recompute, len(bench.work.layers) // stages):
                for cuts in bench.partitions(space.partitions, family, batch.size):
                    choice = Choice(
                        scheme=family.scheme,
                        depth=family.depth,
                        width=width,
                        micro_batch_size=batch.size,
                        micro_batches=batch.number,
                        recompute=recompute,
                        options=family.options,
                        sync=syncs[0],
                        sharded=space.sharded,
                        cuts=cuts,
                        buffers=space.buffers,
                    )
                    bound_s = bench.bound_s(choice)
                    yield from (_Candidate(bound_s, replace(choice, sync=sync)) for sync in syncs)


def _families(bench: _Bench, space: Space, workers: int, mini_batch: int) -> Iterator[Family]:
    for depth in _depths(bench.work, workers):
        if workers // depth > mini_batch or depth not in (space.depths or [depth]):
            continue
        named = (Family(scheme, depth, options) for scheme in space.schemes for options in _options(scheme, depth))
        families = [family for family in named if bench.why_not(family, space) is None]
        # A worker by itself has no pipeline: there all schemes that keep least in memory are one.
        alone = sorted(families, key=lambda of: (of.scheme != RIVAL, len(bench.placement(of).pipes)))[:1]
        yield from alone if depth == 1 else families


def _depths(work: Work, workers: int) -> list[int]:
    """That workers and layers allow."""
    return [depth for depth in range(1, min(workers, len(work.layers)) + 1) if workers % depth == 0]


def _options(scheme: str, depth: int) -> Iterator[Options]:
    """What a scheme can be asked for. Backward halving is doubling with micro-batches of half the size."""
    if scheme in ("chimera", "chimera_zb"):
        for pairs in (1, *(f for f in range(2, MOST_PAIRS + 1) if depth % (2 * f) == 0)):
            of_pairs: Options = (("pairs", pairs),) if pairs > 1 else ()
            yield of_pairs
            if scheme == "chimera":
                yield (("concat", "doubling"), *of_pairs)
    elif "chunks" in options_of(scheme):
        yield from ((("chunks", chunks),) for chunks in (2, 3, 4, 6, 8))
    elif "waves" in options_of(scheme):
        yield from ((("waves", waves),) for waves in (1, 2, 4))
    else:
        yield ()


def batches(scheme: str, mini_batch: int, width: int, space: Space = Space()) -> list[Batch]:
    """The ways to cut a pipeline group's share of a mini-batch, the smallest micro-batches first.

    In micro-batches of a power of two, and of other sizes up to 16 that leave no rest. With a rest, some have a
    sample less than the others. PipeDream updates after each micro-batch, so it has one in a step.
    """
    share = -(-mini_batch // width)
    sizes = {1 << k for k in range(share.bit_length())} | {size for size in range(1, 17) if share % size == 0}
    if space.micro_batch_size:
        sizes = {space.micro_batch_size}
    counts = {min(-(-share // size), mini_batch // width) for size in sizes}
    cut = (Batch(-(-mini_batch // (width * n)), n) for n in ({1} if scheme == "pipedream" else counts))
    least, most = space.micro_batch_size or 1, space.micro_batch_size or space.largest_micro_batch or mini_batch
    return sorted(batch for batch in cut if least <= batch.size <= most)


def _has_sense(family: Family, batch: Batch, stages: int) -> bool:
    """Whether a scheme can have so many micro-batches, and does not do then what another family does as well."""
    if stages * batch.number > MOST_CELLS:
        return False
    if family.scheme == "pipedream_2bw":
        return batch.number >= family.depth
    return ("concat", "doubling") not in family.options or batch.number >= 2 * family.depth


def _recomputations(allowed: Iterable[str | int], layers: int) -> list[str | int]:
    """Those that differ, of stages of so many layers; of a few at a time as many as keep about as much as they need for
    a moment."""
    few = max(round(sqrt(layers)), 1)
    at_a_time = {"none": 0, "layer": 1, "layers": few, "stage": layers}
    found: dict[int, str | int] = {}
    for asked in allowed:
        size = asked if isinstance(asked, int) else at_a_time[asked]
        found.setdefault(min(size, layers), few if asked == "layers" else asked)
    return list(found.values())


# ---- what a choice comes to


class _Bench:
    """A model on a machine, and what the search asks of them again and again."""

    def __init__(self, work: Work, machine: Machine):
        self.work, self.machine = work, _remembering(machine)
        self.placement = lru_cache(maxsize=None)(_placement)
        self._stepped = lru_cache(maxsize=128)(stepped)
        self._balanced: dict[tuple[tuple[float, ...], Pipes], Cuts] = {}
        self._frames: dict[tuple[Choice, Pipes, bool], _Frame] = {}
        self._activations = [0.0, *accumulate(layer.activation_bytes for layer in work.layers)]
        self._deferred = [0.0, *accumulate(layer.deferred_bytes for layer in work.layers)]
        self._stages: dict[Pipes, list[list[int]]] = {}
        self._held: dict[tuple[Choice, Pipes, int], list[float]] = {}
        self._peaks: dict[tuple[str, int, Options, int], list[float]] = {}
        self._needs: dict[Choice, float] = {}
        self._seconds: dict[Choice, float] = {}

    def why_not(self, family: Family, space: Space) -> str | None:
        """Why there is no such pipeline, or none with a layer for each stage, that trains this model like that."""
        try:
            placement = self.placement(family)
            cut_uniformly(len(self.work.layers), placement.stages)
            tied = placement.stages > 1 and self.work.tied_parameters > 0
            check_compatible(placement, tied=tied, sharded=space.sharded, fp16=space.fp16)
        except UnfitDepth as error:
            return error.fault  # its remedy knows neither the workers nor the other depths
        except InputError as error:
            return str(error)
        return None

    def partitions(self, allowed: Iterable[str], family: Family, size: int) -> list[Cuts | None]:
        """Those that differ; None is the uniform one."""
        layers, placement = len(self.work.layers), self.placement(family)
        uniform = tuple(cut_uniformly(layers, placement.stages))
        found: dict[Cuts, Cuts | None] = {}
        for name in allowed:
            cuts = uniform if name == "uniform" else self._cut(family, size)
            if name == "between":
                middles = [(a.start + b.start) // 2 for a, b in zip(uniform[1:], cuts[1:], strict=True)]
                cuts = tuple(cut_at(middles, layers, placement.stages))
            found.setdefault(cuts, None if cuts == uniform else cuts)
        return list(found.values())

    def _cut(self, family: Family, size: int) -> Cuts:
        seconds = [self.machine.forward_s(of, size) + self.machine.backward_s(of, size) for of in self.work.layers]
        longest = max(seconds) or 1
        # To the per cent, so that other sizes of micro-batches ask for the same cuts.
        shares, placement = tuple(round(s / longest, 2) for s in seconds), self.placement(family)
        first = replace(placement, pipes=placement.pipes[:2])  # further pairs are like the first
        if (key := (shares, first.pipes)) not in self._balanced:
            self._balanced[key] = tuple(cut_quickly(shares, first))
        return self._balanced[key]

    def bound_s(self, choice: Choice) -> float:
        """Seconds below which no step of the choice is."""
        of, live = self._frame(choice).posts, _most_live(choice, self.placement(_family(choice)))
        if choice.scheme in STREAMS:
            updates = choice.micro_batches if choice.scheme == "pipedream" else 1
            return _ROUNDED * least_steady_step_s(of, choice.micro_batches, live, updates)
        return _ROUNDED * least_step_s(of, choice.micro_batches, live)

    def step_s(self, choice: Choice) -> float:
        """As `estimate` says. What is recomputed at a time makes no difference to it."""
        alike = replace(choice, recompute="none" if choice.recompute == "none" else "stage")
        if alike not in self._seconds:
            costs = self._frame(choice).costs
            self._seconds[alike] = sum(weight * makespan(of, costs) for weight, of in self._steps(choice))
        return self._seconds[alike]

    def lacking_bytes(self, choice: Choice) -> float:
        """What the fullest worker lacks, 0 or less if it has enough; where much is lacking, what is known at once."""
        least = self._least_bytes(choice)
        return (least if least > self.machine.memory_bytes else self.needed_bytes(choice)) - self.machine.memory_bytes

    def needed_bytes(self, choice: Choice) -> float:
        """On the fullest worker, whenever all-reduces start."""
        alike = replace(choice, sync="")
        if alike not in self._needs:
            self._needs[alike] = _fullest_bytes(memory_in(self.work, choice, self._steps(choice)))
        return self._needs[alike]

    def _least_bytes(self, choice: Choice) -> float:
        """No more than is needed: what has nothing to do with samples, and the activations that are held at once, as if
        all were of the worker's smallest stage."""
        placement = self.placement(_family(choice))
        cuts = choice.cuts or cut_uniformly(len(self.work.layers), placement.stages)
        kept = [self._kept_bytes(cut, choice, bool(placement.split)) for cut in cuts]
        smallest = (min(kept[stage] for stage in stages) for stages in self._stages_of(placement))
        lasting, live = self._lasting(choice, placement), self._live(choice)
        return max(map(lambda held, many, each: held + many * each, lasting, live, smallest))

    def _lasting(self, choice: Choice, placement: Schedule) -> list[float]:
        """Bytes of each worker's weights, gradients and optimizer."""
        alike = replace(choice, scheme="", options=(), sync="", micro_batches=1, micro_batch_size=1, recompute="none")
        if (key := (alike, placement.pipes, placement.updates)) not in self._held:
            found = memory_of(self.work, choice, placement)
            self._held[key] = [of.total_bytes - of.activations_bytes - of.messages_bytes for of in found]
        return self._held[key]

    def _live(self, choice: Choice) -> list[float]:
        """How many activations each worker holds at once."""
        if (key := (*_family(choice), choice.micro_batches)) not in self._peaks:
            self._peaks[key] = peaks(self._steps(choice)[-1][1])
        return self._peaks[key]

    def _stages_of(self, placement: Schedule) -> list[list[int]]:
        """Of each worker."""
        if placement.pipes not in self._stages:
            workers = range(placement.depth)
            self._stages[placement.pipes] = [[stage for _, stage in placement.places(worker)] for worker in workers]
        return self._stages[placement.pipes]

    def _kept_bytes(self, cut: range, choice: Choice, split: bool) -> float:
        """Of a stage of the layers `cut`, at least, of a micro-batch that is under way."""
        recompute = Recompute.of(choice.recompute)
        if recompute.what == "none":
            kept = self._activations[cut.stop] - self._activations[cut.start]
        else:
            kept = sum(self.work.layers[run.start].input_bytes for run in recompute.segments(cut))
        deferred = self._deferred[cut.stop] - self._deferred[cut.start] if split else kept
        return choice.micro_batch_size * min(kept, deferred)

    def _steps(self, choice: Choice) -> Weighted:
        """Its schedules; they are those of all choices with its ops."""
        return self._stepped(replace(choice, width=1, micro_batch_size=1, recompute="none", sharded=False, cuts=None))

    def _frame(self, choice: Choice) -> _Frame:
        """That of all choices with its placement, whatever the number and the order of their ops; streams apart."""
        recompute = "none" if choice.recompute == "none" else "stage"
        scheme = choice.scheme if choice.scheme in STREAMS else ""
        placement = self.placement(_family(choice))
        alike = replace(choice, scheme=scheme, options=(), sync="", micro_batches=1, recompute=recompute)
        key = alike, placement.pipes, bool(placement.split)
        if key not in self._frames:
            costs = costs_of(self.work, self.machine, alike, placement)
            self._frames[key] = _Frame(costs, posts(placement, costs))
        return self._frames[key]


def _remembering(machine: Machine) -> Machine:
    """The same machine, which works out only once how long a layer takes. It knows layers by their identity."""

    def remembered(seconds: Callable[[LayerWork, float], float]) -> Callable[[LayerWork, float], float]:
        known: dict[tuple[int, float], float] = {}

        def looked_up(layer: LayerWork, samples: float) -> float:
            key = id(layer), samples
            if key not in known:
                known[key] = seconds(layer, samples)
            return known[key]

        return looked_up

    twin = copy(machine)
    for name in ("forward_s", "backward_s", "input_s", "weight_s"):
        object.__setattr__(twin, name, remembered(getattr(machine, name)))
    return twin


class _Frame(NamedTuple):
    """What the ops cost, and what that makes of the workers' steps at least."""

    costs: Costs
    posts: tuple[Post, ...]


_ROUNDED = 1 - 1e-9  # bound and simulation add the same numbers in different orders


def _family(choice: Choice) -> Family:
    return Family(choice.scheme, choice.depth, choice.options)


def _placement(family: Family) -> Schedule:
    """The shortest schedule of a family; of a stream, with two updates. Raises ScheduleError if there is none."""
    shortest = {"pipedream": 2, "pipedream_2bw": 2 * family.depth}.get(family.scheme, 1)
    options: dict[str, Any] = dict(family.options)
    return build(family.scheme, family.depth, shortest, **options)


class _Shape(NamedTuple):
    """What tells how many activations a schedule keeps."""

    depth: int
    stages: int
    micro_batches: int


def _most_live(choice: Choice, placement: Schedule) -> int:
    shape = _Shape(placement.depth, placement.stages, choice.micro_batches)
    return LIVE[choice.scheme](cast(Schedule, shape))


def needed_bytes(work: Work, choice: Choice) -> float:
    """On the fullest worker, as an estimate of the choice says."""
    return _fullest_bytes(memory_in(work, choice, stepped(choice)))


def fullest_bytes(found: Estimate) -> float:
    """What the fullest worker needs."""
    return _fullest_bytes(found.memory)


def _fullest_bytes(memory: Iterable[Memory]) -> float:
    return max(of.total_bytes for of in memory)


# ---- what does not fit, or cannot be


def _left_out(bench: _Bench, space: Space, chosen: Collection[str], workers: int) -> tuple[str, ...]:
    """A reason for each scheme that is in no choice."""
    missing = [scheme for scheme in space.schemes if scheme not in chosen]
    deep = [depth for depth in _depths(bench.work, workers) if depth > 1 and depth in (space.depths or [depth])]
    families = (
        Family(scheme, depth, options) for scheme in missing for depth in deep for options in _options(scheme, depth)
    )
    reasons: dict[str, str] = {}
    for family in families:
        if reason := bench.why_not(family, space):
            reasons.setdefault(family.scheme, reason)
    return tuple(reasons.values())


def _nearest_unfit(bench: _Bench, unfit: Sequence[_Candidate], best_s: float) -> Unfit | None:
    """Of what is faster than the best, what lacks least memory; None if it is not among those that lack least."""
    promising = {replace(c.choice, sync=""): c.choice for c in reversed(unfit) if c.bound_s < best_s}
    for lacking, choice in islice(_by_lack(bench, promising.values()), _UNFIT_TRIED):
        if bench.step_s(choice) < best_s:
            return Unfit(estimate(bench.work, bench.machine, choice), lacking)
    return None


_UNFIT_TRIED = 400


def _by_lack(bench: _Bench, choices: Iterable[Choice]) -> Iterator[tuple[float, Choice]]:
    """Bytes that choices lack, and they; the least first. What lacks much is looked at closely only in its turn."""
    line = [(bench.lacking_bytes(choice), False, at, choice) for at, choice in enumerate(choices)]
    heapify(line)
    while line:
        lacking, exact, at, choice = heappop(line)
        if exact:
            yield lacking, choice
        else:
            heappush(line, (bench.needed_bytes(choice) - bench.machine.memory_bytes, True, at, choice))


def _nothing_fits(bench: _Bench, unfit: Sequence[_Candidate], workers: int, mini_batch: int) -> str:
    lacking, choice = next(_by_lack(bench, (candidate.choice for candidate in unfit)))
    limit = bench.machine.memory_bytes
    return (
        f"nothing fits into the memory of {bench.machine.name}: {counted(mini_batch, 'sample')} on "
        f"{counted(workers, 'worker')} need "
        f"at least {gigabytes(limit + lacking)} on one of them ({described(choice)}), and it has {gigabytes(limit)}: "
        f"{_more_room(choice)}"
    )


def _more_room(choice: Choice) -> str:
    smaller = " or a smaller model" if choice.sharded else ", or share out the optimizer: optimizer_sharding=replicas"
    return f"try more workers{smaller}"


def described(choice: Choice) -> str:
    """In a few words: `chimera D=32 W=16 B=1 N=32, recomputing layer`."""
    options = "".join(f" {name}={value}" for name, value in choice.options)
    again = "" if choice.recompute == "none" else f", recompute={choice.recompute}"
    cut = "" if choice.cuts is None else ", balanced"
    return (
        f"{choice.scheme}{options} D={choice.depth} W={choice.width} B={choice.micro_batch_size} "
        f"N={choice.micro_batches}{again}{cut}"
    )


def gigabytes(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes:.0f} bytes"


def _no_choice(bench: _Bench, space: Space, workers: int, mini_batch: int) -> str:
    layers, depths = len(bench.work.layers), _depths(bench.work, workers)
    asked = [depth for depth in depths if depth in (space.depths or depths)]
    if not asked:
        named = ", ".join(map(str, space.depths or ()))
        many = counted(workers, "worker")
        return f"no depth of {named} divides {many} into pipelines of at most {layers}: try one of {depths}"
    if mini_batch * max(asked) < workers:
        return (
            f"a mini-batch of {mini_batch} leaves some of {counted(workers, 'worker')} without a sample, as pipelines "
            f"have at most {max(asked)} of them: give at least {counted(-(-workers // max(asked)), 'sample')}, "
            f"or at most {counted(mini_batch * max(asked), 'worker')}"
        )
    families = list(_families(bench, space, workers, mini_batch))
    if not families:
        return _no_family(bench, space, workers, mini_batch, asked)
    return _no_batch(bench, space, families, workers, mini_batch)


def _no_family(bench: _Bench, space: Space, workers: int, mini_batch: int, asked: Sequence[int]) -> str:
    """Why none of the schemes can have any of the depths that are asked for."""

    def fitting(number: int) -> list[int]:
        return sorted({of.depth for of in _families(bench, replace(space, depths=None), number, mini_batch)})

    named = (Family(of, depth, how) for depth in asked[::-1] for of in space.schemes for how in _options(of, depth))
    reason = next(reason for family in named if (reason := bench.why_not(family, space)))
    if depths := fitting(workers):
        remedy = f"depth {_either(depths)}"
    elif near := [number for number in (workers - 1, workers + 1) if fitting(number)]:
        remedy = f"{_either(near)} worker{'s' * (near != [1])}"
    else:
        remedy = "other schemes"
    return (
        f"{_either(space.schemes)} cannot have a depth of {_either(asked)} on {counted(workers, 'worker')} ({reason}): "
        f"try {remedy}"
    )


def _no_batch(bench: _Bench, space: Space, families: Sequence[Family], workers: int, mini_batch: int) -> str:
    """Why these have no micro-batches: none of a size that is asked for, or too many, or too few of them."""

    def cut(space: Space) -> list[tuple[Family, Batch]]:
        return [(of, batch) for of in families for batch in batches(of.scheme, mini_batch, workers // of.depth, space)]

    asked, whole = cut(space), f"a mini-batch of {mini_batch} on {counted(workers, 'worker')}"
    if not asked:
        sizes = sorted({batch.size for _, batch in cut(Space())})
        if size := space.micro_batch_size:
            near = [*[less for less in sizes if less < size][-1:], *[more for more in sizes if more > size][:1]]
            return f"no pipeline group can cut its share of {whole} into micro-batches of {size}: try {_either(near)}"
        least, most = sizes[0], space.largest_micro_batch
        return f"the micro-batches of {whole} have at least {counted(least, 'sample')}, not {most}: allow so many"
    fewest = min(bench.placement(of).stages * batch.number for of, batch in asked)
    if fewest > MOST_CELLS:
        return (
            f"at least {fewest:,} stages x micro-batches of {whole} are more than can be planned at once, "
            f"{MOST_CELLS:,}: try larger micro-batches or a smaller mini-batch"
        )
    nearest, batch = min(asked, key=lambda each: each[0].depth - each[1].number)
    return (
        f"{nearest.scheme} of depth {nearest.depth} needs as many micro-batches, and {whole} makes {batch.number}: "
        "try smaller micro-batches, a smaller depth or a larger mini-batch"
    )


def _either(words: Iterable[object]) -> str:
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last
