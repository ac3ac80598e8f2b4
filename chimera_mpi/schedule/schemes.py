"""The schemes. Each says when a micro-batch enters its pipeline and when it turns round; one loop weaves.

In the drawings a row is a worker and a column the time that an op takes, the same for all: F forward, B
backward, I input gradient, W weight gradient, each with its micro-batch; lower case on the later stage of a
worker that holds two of one pipeline.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

from .collector import paused_collector
from .depths import UnfitDepth
from .list_scheduler import ordered_for
from .ops import Kind, Op, Place, Schedule, ScheduleError
from .sync import with_stream_updates, with_updates
from .timing import OpCosts
from .weave import Trip, in_gaps, trailing, weave, within_reach


def down(depth: int, first: int = 0) -> list[int]:
    """Stage after stage on worker after worker, from `first` on, round the ring."""
    return [(first + stage) % depth for stage in range(depth)]


def both_ways(depth: int, pairs: int = 1) -> list[list[int]]:
    """Pipelines that start evenly spaced round the ring, each with its mirror image."""
    firsts = (pair * depth // pairs for pair in range(pairs))
    return [pipe[::way] for pipe in (down(depth, first) for first in firsts) for way in (1, -1)]


def zigzag(depth: int, waves: int = 1) -> list[int]:
    """Down the workers and up again, `waves` times; once is a V."""
    return (down(depth) + down(depth)[::-1]) * waves


def even_shares(whole: int, parts: int) -> list[int]:
    """`whole` in `parts` shares that differ by one at most, the larger first."""
    return [whole // parts + (i < whole % parts) for i in range(parts)]


def naive(depth: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time: model parallelism without a pipeline.

    slot  0  1  2  3  4  5  6  7
    P0   F0  .  . B0 F1  .  . B1
    P1    . F0 B0  .  . F1 B1  .
    """
    return weave("naive", [down(depth)], (Trip(0, 2 * depth * n, 2 * depth * n + depth) for n in range(micro_batches)))


def gpipe(depth: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019).

    slot  0  1  2  3  4  5  6  7
    P0   F0 F1 F2  .  . B0 B1 B2
    P1    . F0 F1 F2 B0 B1 B2  .
    """
    flip = depth + micro_batches - 1
    return weave("gpipe", [down(depth)], (Trip(0, n, flip + n) for n in range(micro_batches)))


def one_f_one_b(depth: int, micro_batches: int) -> Schedule:
    """Enter every other slot, so that forwards and backwards take turns (DAPPLE, Fan et al. 2021).

    slot  0  1  2  3  4  5  6  7
    P0   F0 F1  . B0 F2 B1  . B2
    P1    . F0 B0 F1 B1 F2 B2  .
    """
    return weave("1f1b", [down(depth)], taking_turns(depth, micro_batches))


def taking_turns(depth: int, micro_batches: int) -> Iterator[Trip]:
    """1F1B's trips: one every other slot, turning round at once."""
    return (Trip(0, 2 * n, 2 * n + depth) for n in range(micro_batches))


def gems(depth: int, micro_batches: int) -> Schedule:
    """Two pipelines in turn, each micro-batch on the heels of the one before (Jain et al. 2020).

    slot  0  1  2  3  4  5  6  7  8  9
    P0   F0  .  . B0 F1 B1 F2  .  . B2
    P1    . F0 B0 F1  .  . B1 F2 B2  .
    """
    enters = ((n, n * (depth + 1)) for n in range(micro_batches))
    return weave("gems", both_ways(depth), (Trip(n % 2, enter, enter + depth) for n, enter in enters))


def pipedream(depth: int, micro_batches: int) -> Schedule:
    """1F1B without an end: the weights change after each backward (Narayanan et al. 2019).

    A stream over many steps. Forward and backward of a micro-batch use one version of the weights
    (see `used_versions`), so stage `s` keeps up to `depth - s` versions. R and U follow each B.

        slot  0  1  2  3  4  5  6  7
        P0   F0 F1  . B0 F2 B1  . B2
        P1    . F0 B0 F1 B1 F2 B2  .
    """
    return with_stream_updates(weave("pipedream", [down(depth)], taking_turns(depth, micro_batches)), micro_batches)


def pipedream_2bw(depth: int, micro_batches: int, every: int = 0) -> Schedule:
    """1F1B without an end: the weights change every `every` micro-batches (Narayanan et al. 2021).

    A stream over many steps, one of `every` micro-batches, `depth` by default and at least. Two versions
    of the weights are enough (see `used_versions`). Micro-batches over are shared out to the updates.
    Below, R and U follow B1 and B3.

        slot  0  1  2  3  4  5  6  7  8  9
        P0   F0 F1  . B0 F2 B1 F3 B2  . B3
        P1    . F0 B0 F1 B1 F2 B2 F3 B3  .
    """
    every = every or depth
    if every < depth:
        raise ScheduleError(
            f"pipedream_2bw with depth {depth} cannot change the weights every {every} micro-batches, "
            f"two versions would not be enough: try every={depth}"
        )
    updates = max(micro_batches // every, 1)
    return with_stream_updates(weave("pipedream_2bw", [down(depth)], taking_turns(depth, micro_batches)), updates)


def used_versions(schedule: Schedule) -> dict[Op, int]:
    """For each forward, the version of the weights that it and its backward use: the updates they have had.

    It is the newest at hand. PipeDream-2BW takes the one before, which every stage has by then: so the
    stages agree, and a micro-batch of update `u` is always computed with the weights after update `u - 2`.
    """
    versions: dict[Op, int] = {}
    for order in schedule.orders:
        updates: Counter[Place] = Counter()
        for op in order:
            if op.kind is Kind.FORWARD:
                delayed = schedule.scheme == "pipedream_2bw"
                versions[op] = max(schedule.update_of(op.index) - 1, 0) if delayed else updates[op.place]
            updates[op.place] += op.kind is Kind.UPDATE
    return versions


def chimera(depth: int, micro_batches: int, pairs: int = 1, concat: str = "direct") -> Schedule:
    """1F1B in both directions at once (Li and Hoefler 2021, Sections 3.1, 3.5 and 3.6).

    The down pipelines keep to slots of one parity and the up pipelines to the other, so the two never
    meet. A unit is `depth` micro-batches, shared evenly by the pipelines; units follow without a gap.

        slot  0  1  2  3  4  5  6  7  8  9
        P0   F0 F1  . F2 B2 F3 B3 B0  . B1
        P1    . F0 F2 F1 F3 B2 B0 B3 B1  .
        P2    . F2 F0 F3 F1 B0 B2 B1 B3  .
        P3   F2 F3  . F0 B0 F1 B1 B2  . B3

    `concat` says how more than `depth` micro-batches are put together: "direct"; "doubling", units of
    `2 * depth` with the forwards in pairs, which take about as long as one backward, and plain units for
    what is left over; or "halving", the same order on micro-batches of half the size, which the caller
    makes: `micro_batches` counts the halves.
    """
    if concat not in CONCATS:
        raise ScheduleError(f"unknown concat '{concat}': {nearest(concat, CONCATS)}")
    _need_pairs(depth, pairs, "chimera")
    doubled = 0 if concat == "direct" else micro_batches // (2 * depth)

    def trips() -> Iterator[Trip]:
        for unit in range(doubled):
            yield from doubled_unit(depth, 2 * pairs, 3 * depth * unit)
        yield from plain_units(depth, 2 * pairs, micro_batches - 2 * depth * doubled, 3 * depth * doubled, 2 * depth)

    return weave("chimera", both_ways(depth, pairs), trips())


CONCATS = ("direct", "doubling", "halving")


def plain_units(depth: int, pipes: int, micro_batches: int, start: int, period: int) -> Iterator[Trip]:
    """Units of `depth` micro-batches, shared evenly by the pipelines, one every `period` slots."""
    for first in range(0, micro_batches, depth):
        for pipe, share in enumerate(even_shares(min(depth, micro_batches - first), pipes)):
            for j in range(share):
                enter = start + period * (first // depth) + 2 * j
                yield Trip(pipe, enter, enter + depth)


def doubled_unit(depth: int, pipes: int, start: int) -> Iterator[Trip]:
    """The forwards of a plain unit in pairs, and a slot for each of their backwards.

    slot  0  1  2  3  4  5  6  7
    P0   F0 F1 F2 F3 B2 B0 B3 B1
    P1   F2 F3 F0 F1 B0 B2 B1 B3
    """
    for pipe in range(pipes):
        for k in range(2 * depth // pipes):
            block, place = divmod(k, depth // pipes)
            yield Trip(pipe, start + k // 2 * 2 + k % 2 / 2, start + depth + depth * block + 2 * place)


def interleaved(depth: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` stages a worker (Narayanan et al. 2021, SC).

    Micro-batches go round the ring of workers in groups of `depth`. A slot holds a forward and a backward.

        slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
        P0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1  . b2  . b3 B2 B3
        P1    . F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3  .
    """
    pipe = round_the_ring("interleaved", depth, micro_batches, chunks)
    enters = (n // depth * len(pipe) + n % depth for n in range(micro_batches))
    return weave("interleaved", [pipe], (Trip(0, enter, enter + len(pipe) - 0.5) for enter in enters))


def round_the_ring(scheme: str, depth: int, micro_batches: int, chunks: int) -> list[int]:
    """The workers of a pipeline that has `chunks` stages on each. Raises ScheduleError if it cannot be had."""
    if chunks < 1:
        raise ScheduleError(f"{scheme} needs at least 1 chunk a worker, not {chunks}: try chunks=2")
    stages = depth * chunks
    within_reach(scheme, stages, micro_batches, {"chunks=": depth * micro_batches, "micro_batches=": stages})
    return down(depth) * chunks


def hanayo(depth: int, micro_batches: int, waves: int = 1) -> Schedule:
    """Waves up and down the workers: both directions of Chimera with one copy of the weights (Liu et al. 2023).

    Chimera's slots, with the way back up the workers as the up pipeline, `waves` times over.

        slot  0  1  2  3  4  5  6  7  8  9
        P0   F0 F1  . f0 b0 f1 b1 B0  . B1
        P1    . F0 f0 F1 f1 b0 B0 b1 B1  .
    """
    if waves < 1:
        raise ScheduleError(f"hanayo needs at least 1 wave, not {waves}: try waves=2")
    stages = 2 * depth * waves
    within_reach("hanayo", stages, micro_batches, {"waves=": 2 * depth * micro_batches, "micro_batches=": stages})
    return weave("hanayo", [zigzag(depth, waves)], waving(depth, micro_batches, waves, 4 * depth * waves))


def waving(depth: int, micro_batches: int, waves: int, period: int) -> Iterator[Trip]:
    """Units of `depth` micro-batches on `waves` Vs, one every `period` slots."""
    for n in range(micro_batches):
        enter = n // depth * period + 2 * (n % depth)
        yield Trip(0, enter, enter + 2 * depth * waves)


def zb_h1(depth: int, micro_batches: int) -> Schedule:
    """1F1B with a split backward: later stages put off more of their weight gradients (Qi et al. 2024).

    Stage `s` lets `s` weight gradients wait, so each stage keeps as much as the first.

        slot  0  1  2  3  4  5  6  7  8  9
        P0   F0 F1  . I0 W0 F2 I1 W1 I2 W2
        P1    . F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return weave("zb_h1", [down(depth)], taking_turns(depth, micro_batches), trailing(lambda stage: stage))


def interleaved_zb(depth: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """`interleaved` with a split backward, in 1F1B's memory (InterleavedZeroBubble of torch.distributed.pipelining).

    1F1B's slots, a round of the ring for each chunk; weight gradients wait as in `zb_h1`.

        slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18
        P0   F0 F1 f0 f1  . i0 w0 F2 i1 w1 I0 W0 f2 I1 W1 i2 w2 I2 W2
        P1    . F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 I1 W0 f2 i2 W1 I2 w2 W2
    """
    pipe = round_the_ring("interleaved_zb", depth, micro_batches, chunks)
    slots = [stage // depth * 2 * depth + stage % depth for stage in range(len(pipe))]
    enters = (n // depth * 2 * len(pipe) + n % depth * 2 for n in range(micro_batches))
    trips = (Trip(0, enter, enter + slots[-1] + 1) for enter in enters)
    return weave("interleaved_zb", [pipe], trips, trailing(lambda worker: worker), slots, slots[::-1])


def zb_h2(depth: int, micro_batches: int) -> Schedule:
    """As `zb_h1` with twice the slots a stage: no bubble between the first and last op of a worker (Qi et al. 2024).

    slot  0  1  2  3  4  5  6  7  8  9 10 11 12
    P0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3  .
    P1    . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    trips = (Trip(0, 2 * n, 2 * n + 2 * depth - 1) for n in range(micro_batches))
    pace = [2 * stage for stage in range(depth)]
    return weave("zb_h2", [down(depth)], trips, trailing(lambda stage: 2 * stage), pace, pace[::-1])


def chimera_zb(depth: int, micro_batches: int, pairs: int = 1) -> Schedule:
    """Chimera's placement with a split backward: nothing is left of the bubble but the ramp.

    A unit of Chimera leaves each worker `depth` free slots in every `3 * depth`, some between its forwards
    and some between its input gradients. The next unit starts after `3 * depth` slots, no sooner, and the
    weight gradients of both fill exactly what is free: with F = I = W = 1 every worker ends after
    `3 * micro_batches + depth / (2 * pairs) - 1`, and none ever holds more than `depth` activations. A
    forward let in early takes a slot that the input gradients need, and its memory.

        slot  0  1  2  3  4  5  6  7  8  9 10 11 12
        P0   F0 F1  . F2 I2 F3 I3 I0 W2 I1 W3 W0 W1
        P1    . F0 F2 F1 F3 I2 I0 I3 I1 W2 W0 W3 W1
        P2    . F2 F0 F3 F1 I0 I2 I1 I3 W0 W2 W1 W3
        P3   F2 F3  . F0 I0 F1 I1 I2 W0 I3 W1 W2 W3
    """
    _need_pairs(depth, pairs, "chimera_zb")
    trips = plain_units(depth, 2 * pairs, micro_batches, 0, 3 * depth)
    return weave("chimera_zb", both_ways(depth, pairs), trips, in_gaps)


def zb_v(depth: int, micro_batches: int) -> Schedule:
    """A V of half stages with a split backward and 1F1B's memory (placement of Qi et al. 2024).

    `chimera_zb` on twice the workers, cut in half: its up pipeline is the way back up the V.

        slot  0  1  2  3  4  5  6  7  8  9 10 11 12
        P0   F0 F1  . f0 i0 f1 i1 I0 w0 I1 w1 W0 W1
        P1    . F0 f0 F1 f1 i0 I0 i1 I1 w0 W0 w1 W1
    """
    return weave("zb_v", [zigzag(depth)], waving(depth, micro_batches, 1, 6 * depth), in_gaps)


def v_half(depth: int, micro_batches: int) -> Schedule:
    """About half the memory and half the bubble of 1F1B ("controllable memory", Qi et al. 2024).

    slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21
    P0   F0  .  . f0 F1 i0 w0 f1 F2 I0 W0 i1 w1 f2  . I1 W1 i2 w2  . I2 W2
    P1    . F0 f0  .  . F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 W1  . i2 I2 w2 W2
    """
    return building_block("v_half", depth, micro_batches, (2, 1, 2, 1), (1, 0 if depth % 2 else 3, 0))


def v_min(depth: int, micro_batches: int) -> Schedule:
    """About a third of the memory of 1F1B and two thirds of its bubble ("controllable memory", Qi et al. 2024).

    slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20
    P0   F0  .  . f0 i0 w0 F1 I0 W0 f1 i1 w1 F2 I1 W1 f2 i2 w2  . I2 W2
    P1    . F0 f0  .  . i0 I0 F1 f1 w0 W0 i1 I1 F2 f2 w1 W1 i2 I2 w2 W2
    """
    return building_block("v_min", depth, micro_batches, (1, 1, 1, 1), (0, 0 if depth % 3 else 2, 0))


def building_block(
    scheme: str, depth: int, micro_batches: int, paces: tuple[int, ...], waits: tuple[int, ...]
) -> Schedule:
    """Every micro-batch does the same, six slots after the one before, on a V of half stages.

    Its trip has four legs: down and up the V, and back down and up. `paces` are the slots of a leg from
    worker to worker: their sum is the memory, since a worker keeps a half stage for about `sum * depth` of
    every six slots. `waits` at the three turns see to it that no two ops of a worker want the same
    slot, counted modulo six. Four ops and two weight gradients fill the six: only the ramps are idle.
    """
    slots: list[int] = []
    for pace, wait in zip(paces, (0, *waits), strict=True):
        start = slots[-1] + 1 + wait if slots else 0
        slots += (start + pace * hop for hop in range(depth))
    forth, back = slots[: 2 * depth], slots[: 2 * depth - 1 : -1]
    return weave(scheme, [zigzag(depth)], (Trip(0, 6 * n, 6 * n) for n in range(micro_batches)), in_gaps, forth, back)


def dualpipe(depth: int, micro_batches: int) -> Schedule:
    """1F1B in both directions, a forward of one beside a backward of the other in each slot (DeepSeek-V3, 2024).

    A weight gradient follows its input gradient at once.

        slot  0  1  2  3  4  5  6  7  8  9 10 11
        P0   F0 F2 I2 W2 F1 I0 W0 F3 I3 W3 I1 W1
        P1   F2 F0 I0 W0 F3 I2 W2 F1 I1 W1 I3 W3
    """
    _need_even(depth, "dualpipe")
    shares = enumerate(even_shares(micro_batches, 2))
    trips = (Trip(pipe, 2 * j, 2 * j + depth - 0.5) for pipe, share in shares for j in range(share))
    return weave("dualpipe", both_ways(depth), trips, trailing(lambda worker: 0))


def dualpipe_v(depth: int, micro_batches: int) -> Schedule:
    """`dualpipe` on twice the workers, cut in half: its up pipeline is the way back up a V of half stages.

    slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19
    P0   F0 F1  . f0 i0 w0 F2 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1  . I2 W2
    P1    . F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 W1 i2 w2 I2 W2  .
    """
    trips = (Trip(0, 2 * n, 2 * n + 2 * depth - 0.5) for n in range(micro_batches))
    return weave("dualpipe_v", [zigzag(depth)], trips, trailing(lambda worker: 0))


SCHEMES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "gems": gems,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
    "chimera": chimera,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "interleaved_zb": interleaved_zb,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "hanayo": hanayo,
    "chimera_zb": chimera_zb,
}
ALIASES = {"dapple": "1f1b"}
STREAMS = ("pipedream", "pipedream_2bw")

# The most activations, of one stage each, that a worker ever holds.
LIVE: dict[str, Callable[[Schedule], int]] = {
    "naive": lambda schedule: 1,
    "gpipe": lambda schedule: schedule.micro_batches,
    "1f1b": lambda schedule: schedule.depth,
    "gems": lambda schedule: 1,
    "pipedream": lambda schedule: schedule.depth,
    "pipedream_2bw": lambda schedule: schedule.depth,
    "chimera": lambda schedule: 2 * schedule.depth if schedule.micro_batches >= 2 * schedule.depth else schedule.depth,
    "interleaved": lambda schedule: schedule.stages + schedule.depth - 1,
    "zb_h1": lambda schedule: schedule.depth,
    "interleaved_zb": lambda schedule: schedule.stages,
    "zb_h2": lambda schedule: 2 * schedule.depth - 1,
    "zb_v": lambda schedule: schedule.stages,
    "v_half": lambda schedule: schedule.depth + 2,
    "v_min": lambda schedule: 2 - (-2 * schedule.depth // 3),
    "dualpipe": lambda schedule: schedule.depth + 1,
    "dualpipe_v": lambda schedule: schedule.stages + 1,
    "hanayo": lambda schedule: schedule.stages,
    "chimera_zb": lambda schedule: schedule.depth,
}


@paused_collector()
def build(
    scheme: str,
    depth: int,
    micro_batches: int,
    *,
    sync: str = "eager_opt",
    costs: OpCosts | None = None,
    **options: object,
) -> Schedule:
    """The schedule of one step of `scheme`: `depth` workers, `micro_batches` micro-batches.

    `sync` says when each stage's all-reduce starts (see `with_updates`; a stream has its own updates);
    with `costs` the ops of a flush are put in the best order found for them, in the memory of the scheme's
    own and no slower (see `ordered_for`); `options` are the scheme's own. Raises `ScheduleError`, a
    ValueError, with a remedy in it.
    """
    name = ALIASES.get(scheme, scheme)
    if name not in SCHEMES:
        raise ScheduleError(f"unknown scheme {scheme!r}: {nearest(scheme, [*SCHEMES, *ALIASES])}")
    for what, value in ("depth", depth), ("micro_batches", micro_batches):
        if value < 1:
            raise ScheduleError(f"{what} must be at least 1, not {value}: try {what}=4")
    within_reach(name, depth, micro_batches)
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ScheduleError(f"{name} has no option '{option}': its options are {', '.join(['sync', *known])}")
    schedule = SCHEMES[name](depth, micro_batches, **options)
    return with_updates(schedule, sync) if costs is None else ordered_for(costs, schedule, sync)


def options_of(scheme: str) -> list[str]:
    """The options of a scheme of the registry, besides `sync`."""
    return list(inspect.signature(SCHEMES[scheme]).parameters)[2:]


def nearest(word: str, words: Iterable[str]) -> str:
    """A remedy for a misspelt word: the nearest one, or all of them."""
    words = list(words)
    close = get_close_matches(word, words, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(words)}"


def _need_even(depth: int, scheme: str) -> None:
    if depth % 2:
        fitting = f"depth={depth + 1}" if depth < 2 else f"depth={depth - 1} or depth={depth + 1}"
        raise UnfitDepth(f"{scheme} needs an even depth, not {depth}", f"try {fitting}")


def _need_pairs(depth: int, pairs: int, scheme: str) -> None:
    _need_even(depth, scheme)
    if pairs < 1 or depth % (2 * pairs):
        fitting = ", ".join(str(f) for f in range(1, depth // 2 + 1) if depth % (2 * f) == 0)
        raise ScheduleError(
            f"{scheme} with depth {depth} cannot have {pairs} pairs of pipelines: try pairs = {fitting}"
        )
