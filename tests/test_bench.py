"""`chimera-mpi bench`: the emulated model trains as any other, and what is measured comes out whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import launch
import pytest
import torch

from chimera_mpi.cli import main
from chimera_mpi.models import make_layer
from chimera_mpi.models.emulated import Durations, Sleeper, emulated
from chimera_mpi.runtime.grid import Grid
from chimera_mpi.runtime.mailbox import Spec
from chimera_mpi.runtime.parity import parity
from chimera_mpi.runtime.pipeline import Settings
from chimera_mpi.runtime.rehearsal import Emulation, Rehearsal, number_and_target, transfers_s
from chimera_mpi.runtime.stage import Recompute, trace
from chimera_mpi.schedule import COMPUTE, SCHEMES, STREAMS, Kind, build

EMULATE = ["bench", "emulate"]
FORWARD_S, INPUT_S, WEIGHT_S = 1e4, 2e4, 4e4  # so long that no delay of a test makes one look like another


class Awake(Sleeper):
    """Does not sleep, but remembers for how long it should have, to 1000 s."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def until(self, deadline_s):
        self.asked.append(round(deadline_s - time.perf_counter(), -3))


def every_scheme(depth, micro_batches):
    schedules = [build(scheme, depth, micro_batches) for scheme in SCHEMES]
    return pytest.mark.parametrize("schedule", schedules, ids=lambda schedule: schedule.scheme)


@pytest.mark.mpi(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@every_scheme(2, 4)
def test_each_op_sleeps_its_own_time_and_no_other(comm, schedule, recompute):
    sleeper, grid = Awake(), Grid(comm, 2)
    spans = Rehearsal(grid, schedule, Emulation(FORWARD_S, INPUT_S, WEIGHT_S, 400, recompute=recompute), sleeper).step()
    again = [FORWARD_S] * recompute
    wanted = {
        Kind.FORWARD: [FORWARD_S],
        Kind.BACKWARD: sorted([*again, INPUT_S, WEIGHT_S]),
        Kind.INPUT: [*again, INPUT_S],
        Kind.WEIGHT: [WEIGHT_S],
    }
    share = schedule.depth / schedule.stages
    asked = iter(sleeper.asked)
    for op in (span.op for span in spans if span.op.kind in COMPUTE):
        slept = sorted(next(asked) for _ in wanted[op.kind])
        assert slept == [seconds * share for seconds in wanted[op.kind]], op
    assert next(asked, None) is None
    grid.close()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(
    "schedule", [build(s, 4, 5) for s in SCHEMES if s not in STREAMS], ids=lambda schedule: schedule.scheme
)
def test_the_emulated_model_equals_one_process(comm, schedule, recompute):
    model = emulated(schedule.stages, Durations(0.0, 0.0, 0.0), 400, Sleeper(), gradient_bytes=40)
    batches = [number_and_target(number) for number in range(5)]
    differences = parity(comm, schedule, model, batches, Settings(recompute=Recompute(recompute)))
    if differences is not None:
        assert len(differences) == schedule.stages * len(schedule.pipes)
        assert max(difference.relative for difference in differences) < 1e-12


@pytest.mark.mpi(4)
def test_transfers_are_measured_between_neighbours(comm):
    grid = Grid(comm, 2)
    links = transfers_s(grid, 1000)
    assert len(links) == 2 and min(links) > 0
    grid.close()


def test_gradients_are_those_of_a_product():
    model = emulated(3, Durations(0.0, 0.0, 0.0), 12, Sleeper())
    layers = torch.nn.Sequential(*(make_layer(model, index, seed=1, dtype=torch.float64) for index in range(3)))
    x = torch.tensor([[2.0, 9.0, 9.0], [3.0, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    output = layers(x)
    product = x.detach()[:, :1] * layers[0].weight * layers[1].weight * layers[2].weight
    assert torch.equal(output, product)
    weights = [layer.weight for layer in layers]
    ours, plain = (torch.autograd.grad(y.square().sum(), weights, retain_graph=True) for y in (output, product))
    torch.testing.assert_close(ours, plain)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert gradient[:, 0].tolist() == pytest.approx([(weights[0] * weights[1] * weights[2]).item()] * 2)
    assert not gradient[:, 1:].any()


def test_messages_and_gradients_are_as_large_as_asked_for():
    model = emulated(3, Durations(1e4, 1e4, 1e4), 1000, Sleeper(), gradient_bytes=80)  # tracing does not sleep
    sizes = [spec.shape for (spec,) in trace(model, (Spec((1, 1), torch.float32),)).outputs]
    assert sizes == [(1, 250), (1, 250), (1, 1)]
    assert [sum(p.nbytes for p in layer().parameters()) for layer in model.layers] == [80, 80, 80]


def test_a_sleep_is_never_too_short_and_what_is_too_long_is_counted():
    sleeper = Sleeper()
    deadline_s = time.perf_counter() + 2e-3
    sleeper.until(deadline_s)
    assert 0 < sleeper.overshoot_s <= time.perf_counter() - deadline_s
    before_s = sleeper.overshoot_s
    sleeper.until(deadline_s)  # it has passed
    assert sleeper.overshoot_s == before_s


def test_emulate_has_a_row_for_each_scheme(tmp_path: Path) -> None:
    options = ["--forward-ms", "0.2", "--micro-batches", "4", "--message-bytes", "4", "4096", "--repeat", "2"]
    job = launch.chimera(4, *EMULATE, *options, "--json", str(tmp_path / "found.json"))
    assert job.returncode == 0, job.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert sorted((row["scheme"], row["message_bytes"]) for row in found["rows"]) == sorted(
        (scheme, size) for scheme in SCHEMES for size in (4, 4096)
    )
    for row in found["rows"]:
        assert len(row["steps_s"]) == 2 and row["micro_batches"] == 4
        assert row["plan_s"] < min(row["plan_with_messages_s"], *(2 * s for s in row["steps_s"]))  # it did sleep
        assert row["ratio"] == pytest.approx(row["median_s"] / row["plan_s"])
        assert row["ratio_with_messages"] == pytest.approx(row["median_s"] / row["plan_with_messages_s"])
    by_scheme = {row["scheme"]: row for row in found["rows"]}
    assert by_scheme["1f1b"]["plan_s"] == pytest.approx((4 + 3) * 0.6e-3)
    assert len(found["transfers_s"]["4096"]) == 3 and not found["refused"]
    assert job.stdout.count("4 ranks = depth 4 x width 1") == 1
    assert all(job.stdout.count(f"\n  {scheme} ") == 2 for scheme in SCHEMES)


def test_what_cannot_be_had_is_left_out(tmp_path: Path) -> None:
    options = ["--schemes", "1f1b", "chimera", "--micro-batches", "3", "--forward-ms", "0.2", "--repeat", "1"]
    job = launch.chimera(3, *EMULATE, *options, "--json", str(tmp_path / "found.json"))
    assert job.returncode == 0, job.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["scheme"] for row in found["rows"]] == ["1f1b"]
    assert "left out: chimera needs an even depth, not 3" in job.stdout and len(found["refused"]) == 1


WRONG = {
    "--repeat: must be a whole number of 1 or more, not '0'": ["--repeat", "0"],
    "depth 4 does not divide the 1 MPI ranks": ["--depth", "4"],
    "unknown scheme 'chimra': did you mean 'chimera'?": ["--schemes", "chimra"],
    "--input-ms 5 is a part of the backward: give --backward-ms 5 or more": ["--input-ms", "5", "--backward-ms", "4"],
    "--forward-ms: must be 0 or between 1e-15 and 1e15, not -1": ["--forward-ms=-1"],
    "the whole step takes 0 s": ["--forward-ms", "0"],
    "chimera needs an even depth, not 1": ["--schemes", "chimera"],
    "cannot write / (Is a directory)": ["--json", "/"],
    "has no option '--message-byte': did you mean '--message-bytes'?": ["--message-byte", "4"],
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], message: str) -> None:
    assert main([*EMULATE, *WRONG[message]]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("chimera-mpi: ") and err.count("\n") == 1 and not out
