"""The loop around a run."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..checkpoint import Checkpoint, Draft, LayerFile
from ..errors import InputError, RunFailed, refusing
from ..runlog import StepRow
from ..runtime.agreement import agree
from ..runtime.crew import ALL_WELL, Crew, Died
from ..runtime.grid import Comm
from ..runtime.handover import Handover, missing, transfers
from ..runtime.state import LayerState
from ..stopping import AGAIN, End
from ..train import Begun, Job, Run
from .layouts import fits, layouts
from .standing import Layers, Left, Standing, is_behind, layers_of, seats


class Recovery(NamedTuple):
    """What became of a run that a death has interrupted, for people and for the log."""

    told: str  # who died, and what others were at
    gone: tuple[int, ...]
    done: int  # steps
    began_s: float  # by time.monotonic
    seated: tuple[int, ...] = ()  # who goes on, by the same numbers, in the order of the new ranks
    idle: int = 0  # ranks that are left without a place
    rows: tuple[StepRow, ...] = ()  # of the last steps
    ends: bool = False  # whether nobody goes on

    @property
    def attributes(self) -> dict[str, str | int | float]:
        """As the log's next session has it."""
        took = {} if self.ends else {"recovery_s": time.monotonic() - self.began_s}
        numbers = {"died": json.dumps(self.gone), "seated": json.dumps(self.seated)}
        return {"death": self.told, **numbers, "steps_done": self.done, **took}

    def __str__(self) -> str:
        idle = f", {self.idle} stand{'s' * (self.idle == 1)} by" if self.idle else ""
        return f"{self.told}: goes on after {self.done} steps, {time.monotonic() - self.began_s:.2f} s later{idle}"


Launch = Callable[[Comm, Job, Checkpoint | Begun | None, Recovery | None], Run]


@dataclass
class Survival:
    """The runs of a job, one after the other, as ranks die. All ranks of the crew have one, with the same job.

    `launch` begins a run over a communicator, and does what its first rank has to do beside it; `note` writes down what
    has become of one that none follows.
    """

    crew: Crew
    job: Job  # as it was asked for
    launch: Launch
    note: Callable[[Job, Recovery], None]
    resumed: Checkpoint | None
    room_bytes: Callable[[], float]  # for what this rank would hold, beside what it holds
    device: str = "cpu"  # "cpu" or "cuda"
    run: Run | None = None  # the last one that stood, on those who have a place in it

    def __post_init__(self) -> None:
        self._built: Run | None = None  # one that does not stand yet, and what it is made of
        self._comm: Comm | None = None
        self._handover: Handover | None = None
        self._saw, self._speaker, self._leads = "", 0, False

    def until_the_end(self) -> End:
        """How the last run ended. Raises RunFailed on all ranks."""
        begin: Callable[[], End | None] = self._first
        gone: tuple[int, ...] = ()
        began_s = 0.0
        while True:
            try:
                if end := self.crew.attempt(begin, self._give_up):
                    return end
                self.run, self._built, gone = self._built, None, ()
                gc.collect()  # what the run before held
                ended = self.crew.attempt(self._sail, self._abandon)
                code = self.crew.agree(_coded(ended)) >> 2
                return ended or End("", code)
            except Died as died:
                began_s = began_s if gone else time.monotonic()
                self._saw = ("a recovery" if gone else self._at(died.where)) if died.saw_it else ""
                gone = tuple(sorted((*gone, *self.crew.shrink())))
                begin = partial(self._go_on, gone, began_s)

    @property
    def speaks(self) -> bool:
        """Whether it is for this rank to say how it ended: of the last run's ranks the first that lives."""
        return self.crew.comm.rank == self._speaker

    def _first(self) -> None:
        self._begin(self.job, range(self.job.width * self.job.plan.schedule.depth), self.resumed)

    def _begin(
        self, job: Job, seats: Sequence[int], begun: Checkpoint | Begun | None, recovery: Recovery | None = None
    ) -> None:
        """Build a run over those who have a seat. Collective over the crew."""
        self._comm = self.crew.seated(seats)
        if self._comm is not None:
            self._leads |= self._comm.rank == 0
            with _failing() if recovery else nullcontext():
                self._built = self.launch(self._comm, job, begun, recovery)

    def _at(self, op: str) -> str:
        """What this rank was at when it learned of a death: an op, or what it had an excuse for, or both."""
        excuse = self.run.here.excuse if self.run else ""
        return " of ".join(filter(None, (op, excuse))) or "between two steps"

    def _sail(self) -> End | None:
        if self.run is None:
            return None
        self.run.grid.heeds.append(self.crew.comm)  # on which those who stand by find out that one of them has died
        return self.run.run()

    def _abandon(self) -> None:
        if self.run and self._comm:
            self._comm.Revoke()
            self.run.abandon()

    def _give_up(self) -> None:
        """Let go of what was begun over ranks of which one has died since."""
        built, self._built = self._built, None
        if self._comm is not None:
            self._comm.Revoke()
        if built:
            built.abandon()
        if self._handover:
            self._handover.abandon()

    def _go_on(self, gone: tuple[int, ...], began_s: float) -> End | None:
        """Build the run that goes on without the ranks that are `gone`; or how it ends here. Collective."""
        with self.crew.limited("a recovery"):
            mine = self._standing()
            left = Left(tuple(self.crew.comm.allgather(mine)), gone)
            self._speaker = left.first
            if left.last and is_behind(mine, left.last):
                self._own.pipeline.worker.finish(left.last)
            rows = self.crew.comm.bcast(self.run and self.run.last_rows(), left.ahead)
            recovery = Recovery(left.told, left.gone, left.done, began_s, rows=tuple(rows or ()))
            lost = missing([standing.layers for standing in left.standings], len(self.job.task.model.layers))
            job = None if lost else self._next_job(left)
            if job is not None:
                self._hand_over(left, job, recovery)
                return None
            with _failing():
                agree(self.crew.comm, lambda: self._note(left, recovery._replace(ends=True)))
            return self._lost(left, lost) if lost else self._save(left)

    def _next_job(self, left: Left) -> Job | None:
        """The layout most like that of the job that those who are left can fill."""
        room_bytes = min(standing.room_bytes for standing in left.standings)
        return next((job for job in layouts(self.job, len(left.standings)) if fits(job, room_bytes, self.device)), None)

    def _note(self, left: Left, recovery: Recovery) -> None:
        if self.crew.comm.rank == left.first:
            self.note(self.run.job if self.run else self.job, recovery)

    @property
    def _own(self) -> Run:
        assert self.run is not None
        return self.run

    def _standing(self) -> Standing:
        room_bytes, saw = self.room_bytes(), self._saw
        if self.run is None:
            return Standing(room_bytes=room_bytes, saw=saw, leads=self._leads)
        pipeline, scale, saver = self.run.pipeline, self.run.pipeline.loss_scale, self.run.saver
        return Standing(
            seat=self.run.grid.world.rank,
            done=self.run.done,
            judged=pipeline.worker.judged,
            layers=frozenset(pipeline.held_layers),
            loss_scale=(scale.value, scale.steps) if scale else None,
            room_bytes=room_bytes,
            saw=saw,
            saved=(saver.newest_step, saver.newest) if saver else (-1, None),
            leads=self._leads,
        )

    def _hand_over(self, left: Left, job: Job, recovery: Recovery) -> None:
        """Begin a run of this job on those who are left, and send each what he lacks."""
        comm, schedule, standings = self.crew.comm, job.plan.schedule, left.standings
        wanted = [layers_of(schedule, job.cuts, worker) for worker in range(schedule.depth)] * job.width
        taken = seats(standings, wanted)
        self._speaker = taken[0]
        wants = [wanted[taken.index(rank)] if rank in taken else Layers() for rank in range(len(standings))]
        handover = self._handover = Handover(comm, self.crew.patience, job.config.message_limit_bytes)
        givers: dict[int, int] = {}
        for layer, giver, taker in transfers([standing.layers for standing in standings], wants):
            if giver == comm.rank:
                handover.give(layer, self._own.pipeline.state_of(layer), taker)
            if taker == comm.rank:
                givers[layer] = giver

        def read(layer: int) -> LayerState:
            return handover.take(layer, givers[layer]) if layer in givers else self._own.pipeline.state_of(layer)

        saved, path = left.saved
        begun = Begun(left.done, read, standings[left.ahead].loss_scale, path, saved)
        seated = tuple(self.crew.ranks[rank] for rank in taken)
        self._begin(job, taken, begun, recovery._replace(seated=seated, idle=len(standings) - len(taken)))
        handover.finish()

    def _lost(self, left: Left, layers: Sequence[int]) -> End:
        """Some layers died with the last who had them."""
        saved, path = left.saved
        if left.done < 0:
            return End(f"{left.told} before the first step: start it again", 1)
        many = f"layers {', '.join(map(str, layers))} are" if len(layers) > 1 else f"layer {layers[0]} is"
        why = f"{left.told}, and {many} on none of those that are left: stopped after {left.done} steps"
        if path is None:
            return End(f"{why}, nothing is saved: next time give checkpoint=FOLDER", 1)
        return End(f"{why}, the last checkpoint is {path}, of {saved} steps: go on by resume=auto", AGAIN)

    def _save(self, left: Left) -> End:
        """Write a checkpoint of what is whole, where those who are left have no layout. Collective."""
        folder, ranks = self.job.config.checkpoint, len(left.standings)
        many = f"{ranks} rank{'s' * (ranks > 1)}"
        why = f"{left.told}, and no layout fits on {many}: stopped after {left.done} steps"
        if folder is None:
            return End(f"{why}, nothing is saved: next time give checkpoint=FOLDER", 1)
        if left.saved[0] < left.done:
            self._write(left, Draft(folder, left.done))
        return End(f"{why}, saved in {folder}: go on by resume=auto", AGAIN)

    def _write(self, left: Left, draft: Draft) -> None:
        """A checkpoint, each of those who are left some layers of it. Collective."""
        comm, standings = self.crew.comm, left.standings
        writers = {layer: rank for rank in reversed(range(len(standings))) for layer in standings[rank].layers}

        def write() -> dict[int, LayerFile]:
            with refusing(f"{draft.path} cannot be written"):
                own = (layer for layer, rank in writers.items() if rank == comm.rank)
                return {layer: draft.write(layer, self._own.pipeline.state_of(layer)) for layer in own}

        def commit(files: Mapping[int, LayerFile]) -> None:
            with refusing(f"{draft.path} cannot be written"):
                if comm.rank == left.ahead and (saver := self._own.saver):
                    draft.commit(files, self._own.facts(left.done), saver.keep, left.saved[0], saver.attached)

        with _failing():
            everyone = comm.allgather(agree(comm, write))
            agree(comm, lambda: commit({layer: file for of_rank in everyone for layer, file in of_rank.items()}))


@contextmanager
def _failing() -> Iterator[None]:
    """What would be a user's mistake at the start of a job ends it later on."""
    try:
        yield
    except InputError as error:
        raise RunFailed(str(error), on_all=True) from None


def _coded(end: End | None) -> int:
    """An exit code beside the bits that say that all is well; without one, what leaves those of others as they are."""
    return -1 if end is None else end.code << 2 | ALL_WELL
