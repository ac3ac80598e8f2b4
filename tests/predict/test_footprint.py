"""What a worker holds, by laws: the parts add up, and go where they should."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import NamedTuple

import pytest

from chimera_mpi.predict import peak_bytes, simulate
from chimera_mpi.predict.footprint import Buffers, Footprint, memory_of
from chimera_mpi.predict.memory import Sizes, most_held
from chimera_mpi.predict.partition import Recompute
from chimera_mpi.predict.work import Transformer, bert_work, gpt_work
from chimera_mpi.schedule import SCHEMES, build

SHAPE = {"layers": 14, "hidden": 64, "heads": 4, "vocabulary": 500, "positions": 32, "sequence_length": 32}
WORK = gpt_work(Transformer(**SHAPE, tied=False))


class Choice(NamedTuple):
    width: int = 1
    micro_batch_size: int = 4
    recompute: str | int = "none"
    options: tuple = ()
    sharded: bool = False
    cuts: list | None = None
    buffers: Buffers = Buffers()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_most_held_is_the_peak_of_the_memory_curve(scheme):
    """Whatever the ops take: what a worker holds changes with its own order alone."""
    schedule = build(scheme, 4, 8)
    sizes = [Sizes(10 + stage, 3 + stage, 5) for stage in range(schedule.stages)]
    activation, deferred, working, _ = zip(*sizes, strict=True)
    peaks = peak_bytes(simulate(schedule), activation, 0, deferred, working)
    assert [most_held(order, sizes) for order in schedule.orders] == [peak.size_bytes for peak in peaks]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_add_up_and_weights_are_all_there(scheme):
    schedule = build(scheme, 4, 8)
    memory = memory_of(WORK, Choice(), schedule)
    assert all(m.total_bytes == sum(astuple(m)) for m in memory)
    assert sum(m.weights_bytes for m in memory) == 4 * WORK.parameters * len(schedule.pipes)
    assert sum(m.state_bytes for m in memory) == 8 * WORK.parameters * len(schedule.pipes)
    assert all((m.versions_bytes > 0) == (scheme in ("pipedream", "pipedream_2bw")) for m in memory[:3])


@pytest.mark.parametrize("scheme", ["1f1b", "chimera", "zb_h1", "dualpipe"])
def test_what_is_asked_for_saves_what_it_should(scheme):
    schedule = build(scheme, 4, 8)
    plain = memory_of(WORK, Choice(width=8), schedule)
    again = memory_of(WORK, Choice(width=8, recompute="stage"), schedule)
    shared = memory_of(WORK, Choice(width=8, sharded=True), schedule)
    half = memory_of(replace(WORK, parameter_bytes=2, master_bytes=4), Choice(width=8), schedule)
    replicas = 8 * len(schedule.pipes)
    for before, after in zip(plain, again, strict=True):
        assert after == replace(before, activations_bytes=after.activations_bytes)
        assert after.activations_bytes <= before.activations_bytes
    assert 2 * again[0].activations_bytes < plain[0].activations_bytes
    for before, after in zip(plain, shared, strict=True):
        assert after == replace(before, state_bytes=before.state_bytes / replicas)
    for before, after in zip(plain, half, strict=True):
        assert after.masters_bytes == before.weights_bytes == 2 * after.weights_bytes


def test_recomputing_fewer_layers_at_a_time_needs_less_at_work_and_keeps_more():
    schedule = build("gpipe", 2, 4)
    kept, working = zip(
        *(Footprint(WORK, schedule, [range(8), range(8, 16)], 4, recompute=Recompute("layer", k)).sizes(0)[:3:2]
          for k in (1, 2, 4, 8)),
        strict=True,
    )  # fmt: skip
    assert list(kept) == sorted(kept, reverse=True) and list(working) == sorted(working)
    assert Footprint(WORK, schedule, [range(8), range(8, 16)], 4, recompute=Recompute("stage")).sizes(0)[0] == kept[-1]


@pytest.mark.parametrize("work", [gpt_work, bert_work])
def test_a_tied_matrix_is_there_once_in_a_stage_that_has_both_and_summed_once_on_a_worker(work):
    tied, free = (work(Transformer(**SHAPE, tied=tied)) for tied in (True, False))
    matrix_bytes = 4 * SHAPE["vocabulary"] * SHAPE["hidden"]
    for scheme, depth, weights, gradients in (("1f1b", 1, 1, 1), ("1f1b", 2, 0, 0), ("chimera", 2, 0, 1)):
        schedule = build(scheme, depth, 2)
        for less, more in zip(memory_of(tied, Choice(), schedule), memory_of(free, Choice(), schedule), strict=True):
            assert more.weights_bytes - less.weights_bytes == weights * matrix_bytes
            assert more.gradients_bytes - less.gradients_bytes == gradients * matrix_bytes


def test_backward_halving_holds_halves():
    schedule = build("chimera", 4, 8, concat="halving")
    whole, halves = (memory_of(WORK, Choice(options=options), schedule) for options in ((), (("concat", "halving"),)))
    assert all(h.activations_bytes < w.activations_bytes for h, w in zip(halves, whole, strict=True))
    assert halves == memory_of(WORK, Choice(micro_batch_size=2), schedule)
