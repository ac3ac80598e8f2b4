"""How those stand who are left when ranks have died, and what follows from it: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..runtime.worker import Judged
from ..schedule import Schedule

Layers = frozenset[int]


class Standing(NamedTuple):
    """What a rank that is left has, in a run that was interrupted, or none of it where it stood by."""

    seat: int | None = None
    done: int = -1
    judged: Judged | None = None
    layers: Layers = frozenset()
    loss_scale: tuple[float, int] | None = None
    room_bytes: float = 0.0  # for what it will hold beside this
    saw: str = ""  # what it was at, if it was waiting for the dead; others only heard of it
    saved: tuple[int, Path | None] = (-1, None)  # the last checkpoint, and the steps in it
    leads: bool = False  # it has the log and the folder, also of a run that did not come to stand

    @property
    def reached(self) -> tuple[int, int]:
        """The last step that it has judged, and how many are done."""
        return self.judged.step if self.judged else -1, self.done


class Left(NamedTuple):
    """How those stand who are left, in the order of their ranks."""

    standings: tuple[Standing, ...]
    gone: tuple[int, ...]  # as ranks were numbered when the job began

    @property
    def ahead(self) -> int:
        """Who has got furthest; the others have, or can make, all that he has."""
        return max(range(len(self.standings)), key=lambda rank: self.standings[rank].reached)

    @property
    def first(self) -> int:
        """Who leads, or else had the first seat of those that are left."""
        order = [(not standing.leads, standing.seat is None, standing.seat) for standing in self.standings]
        return order.index(min(order))

    @property
    def last(self) -> Judged | None:
        """The last step that anybody has judged."""
        return self.standings[self.ahead].judged

    @property
    def done(self) -> int:
        return self.standings[self.ahead].done

    @property
    def saved(self) -> tuple[int, Path | None]:
        return max((standing.saved for standing in self.standings), key=lambda saved: saved[0])

    @property
    def told(self) -> str:
        saw = next((standing.saw for standing in self.standings if standing.saw), "")
        return f"rank{'s' * (len(self.gone) > 1)} {', '.join(map(str, self.gone))} died{saw and f' ({saw})'}"


def is_behind(standing: Standing, last: Judged) -> bool:
    """Whether a rank has yet to make the update of the `last` step that others have judged."""
    return standing.seat is not None and (standing.judged is None or standing.judged.step < last.step)


def layers_of(schedule: Schedule, cuts: Sequence[range], worker: int) -> Layers:
    return frozenset(index for _, stage in schedule.places(worker) for index in cuts[stage])


def seats(standings: Sequence[Standing], wanted: Sequence[Layers]) -> list[int]:
    """Who takes which seat of a new run, to which `wanted` layers belong: who had it keeps it, or else one who has most
    of its layers. Who leads has the first in any case."""
    free = set(range(len(standings)))
    taken: dict[int, int] = {}

    def take(seat: int, rank: int) -> None:
        taken[seat] = rank
        free.remove(rank)

    for rank, standing in enumerate(standings):
        seat = 0 if standing.leads else standing.seat
        if seat is not None and seat < len(wanted) and (standing.leads or wanted[seat] <= standing.layers):
            take(seat, rank)
    for seat, layers in enumerate(wanted):
        if seat not in taken:
            take(seat, max(free, key=lambda rank: (len(layers & standings[rank].layers), -rank)))
    return [taken[seat] for seat in range(len(wanted))]
