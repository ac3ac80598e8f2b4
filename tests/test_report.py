"""What a log says of a run that was resumed in another layout."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from chimera_mpi import report


@pytest.mark.parametrize(("resumed_at", "expected"), [(2, [90, 180]), (0, [40, 80])])
def test_the_memory_of_workers_is_that_of_the_first_session(resumed_at, expected) -> None:
    """Two ranks, then one; a second session that began anew leaves at least the first step."""
    first, second = (SimpleNamespace(first_step=step, attributes={}) for step in (0, resumed_at))
    run = SimpleNamespace(
        attributes={"held_before_bytes": json.dumps([10, 20]), "width": 1},
        sessions=[first, second],
        steps={"step": np.arange(3)},
        workers={"peak_bytes": np.array([[50, 100], [100, 200], [900, np.nan]])},
    )
    assert report._held(run).tolist() == [expected]


def test_the_steps_that_are_asked_for_are_those_of_the_last_session() -> None:
    first, second = ({"config": json.dumps({"model": "gpt", "steps": steps})} for steps in (4, 6))
    sessions = [SimpleNamespace(first_step=0, attributes=of) for of in (first, second)]
    assert report._steps_asked(SimpleNamespace(sessions=sessions)) == 6


def test_a_line_for_each_death_that_was_survived() -> None:
    death = {"death": "rank 3 died (op 1F1@1)", "steps_done": 13, "recovery_s": 0.7912}
    last = {"death": "rank 0 died", "steps_done": 15}
    sessions = [SimpleNamespace(attributes=of, ranks=ranks) for of, ranks in (({}, 4), (death, 2), (last, 1))]
    assert report.deaths(SimpleNamespace(sessions=sessions)) == [
        "survived    rank 3 died (op 1F1@1); after 13 steps 2 ranks went on in 0.79 s",
        "ended       rank 0 died; after 15 steps nobody could go on",
    ]
