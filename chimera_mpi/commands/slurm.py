"""Write a Slurm job that trains until it is done, through time limits and preemption. `sbatch` takes it as it is."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..errors import InputError
from ._plan import count

EXAMPLE = """\
  chimera-mpi slurm train.toml --nodes 64 --gpus-per-node 4 scheme=chimera depth=16 > job.sbatch
  sbatch job.sbatch"""

LONGEST_WARNING_S = 65_535  # that sbatch takes
EARLY_S = 60  # by which Slurm's warning may come before its time

What = Literal["train", "plan_and_train", "calibrate"]


@dataclass(frozen=True)
class Settings:
    """What a job is made from. Raises InputError for what neither Slurm nor a shell would take as it is meant."""

    what: What = "train"
    config: str = "gpt-tiny"  # a preset or a file of keys
    keys: tuple[str, ...] = ()  # key=value, over those of the configuration
    name: str = "chimera"
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None  # None: all of the nodes, shared out
    time: str = "1:00:00"  # as Slurm writes it
    warning_s: int = 300  # before the time limit, when the ranks are asked to stop
    env: str = "scripts/slurm/env.sh"  # seen from the folder that the job is submitted in
    options: tuple[str, ...] = ()  # further ones of sbatch, such as partition=gpu

    def __post_init__(self) -> None:
        for what in ("config", "name", "env"):
            if not re.fullmatch(r"[\w./@+:=,-]+", getattr(self, what)):
                raise InputError(f"{what} {getattr(self, what)!r} has characters that a shell reads: rename it")
        for option in self.options:
            if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", option):
                raise InputError(f"{option!r} is no option of sbatch: give, for example, --option partition=gpu")
            if ours := _SET.get(option.partition("=")[0]):
                raise InputError(
                    f"--option {option} would go over {ours}, which the job is made for: give {ours} instead"
                )
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise InputError(f"time {self.time!r} is none of Slurm's: try 1:00:00 for an hour, 2-00:00:00 for two days")
        if self.warning_s > LONGEST_WARNING_S:
            raise InputError(
                f"Slurm warns {LONGEST_WARNING_S} s before the end at most, not {self.warning_s}: try --warning-s 300"
            )
        if self.what != "calibrate" and 0 < _seconds(self.time) <= self.warning_s + EARLY_S:
            raise InputError(
                f"a warning {self.warning_s} s before the end of --time {self.time}, up to {EARLY_S} s early, may come "
                "at the start, and the job queue itself again for ever: give a longer --time, or a shorter --warning-s"
            )

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.nodes * self.ranks_per_node


_SET = {  # options of sbatch, and that of this command which sets it
    "job-name": "--name",
    "nodes": "--nodes",
    "ntasks": "--ranks-per-node",
    "ntasks-per-node": "--ranks-per-node",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-rank",
    "time": "--time",
    "signal": "--warning-s",
}


def _seconds(time: str) -> int:
    """A limit as Slurm reads it, in whole minutes; 0 is none. Days come before hours, else the first are minutes unless
    there are three."""
    days, _, rest = time.rpartition("-")
    parts = [*map(int, rest.split(":"))]
    if not days and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return 60 * math.ceil((((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds) / 60)


def job_script(settings: Settings) -> str:
    """The text of the job. A pure function."""
    keys = _keys(settings)
    blocks = {
        "calibrate": [_START, keys, _MEASURE],
        "train": [_LISTEN, _START, keys, _POINT, _TRAIN],
        "plan_and_train": [_LISTEN, _START, keys, _POINT, _PLAN, _TRAIN],
    }
    return "\n".join([_directives(settings), _settings(settings), *blocks[settings.what]])


_TITLES = {
    "train": "Train until it is done, through time limits and preemption.",
    "plan_and_train": "Measure the machine once, plan the run for it, then train until it is done.",
    "calibrate": "Measure the machine with the layers of a model, for chimera-mpi plan.",
}


def _directives(settings: Settings) -> str:
    options = "".join(f"#SBATCH --{option}\n" for option in _options(settings))
    return f"""\
#!/bin/bash
# {_TITLES[settings.what]} Written by chimera-mpi slurm.
#   sbatch [OPTIONS] FILE [KEY=VALUE ...]
# Options of sbatch overrule the lines that follow; NAME=VALUE in its environment overrules a setting.
{options}"""


def _options(settings: Settings) -> Iterator[str]:
    yield f"job-name={settings.name}"
    yield f"nodes={settings.nodes}"
    yield f"ntasks-per-node={settings.ranks_per_node}"
    if settings.gpus_per_node:
        yield f"gpus-per-node={settings.gpus_per_node}"
    yield f"cpus-per-task={settings.cpus_per_rank}" if settings.cpus_per_rank else "exclusive"
    yield f"time={settings.time}"
    if settings.what != "calibrate":
        yield f"signal=B:USR1@{settings.warning_s}"
        yield "requeue"
    yield "open-mode=append"
    yield "output=%x-%j.out"
    yield from settings.options


def _settings(settings: Settings) -> str:
    lines = [(f"CHIMERA_ENV=${{CHIMERA_ENV:-{settings.env}}}", "modules, environment and srun of this cluster")]
    lines.append((f"CONFIG=${{CONFIG:-{settings.config}}}", "a preset or a file of keys"))
    if settings.what != "train":
        lines.append(("MACHINE=${MACHINE:-machine.toml}", "what calibrate measures"))
    if settings.what != "calibrate":
        lines.append(("RUN=${RUN:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}", "its folder: log, checkpoints, exit code"))
    width = max(len(line) for line, _ in lines)
    return "".join(f"{line:{width}}  # {meaning}\n" for line, meaning in lines)


def _keys(settings: Settings) -> str:
    return f"keys=({' '.join(map(shlex.quote, settings.keys))})"


_LISTEN = """\
# Slurm warns this shell alone. srun hands the signal to all ranks, which save and leave together with exit code 75.
ranks='' warned='' asked=yes
trap 'warned=yes asked=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1 TERM
"""

_START = """\
# shellcheck source=scripts/slurm/env.sh
source "$CHIMERA_ENV" || exit 2
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST:" \\
    "$SLURM_NTASKS ranks, $OMP_NUM_THREADS threads each, by ${launcher[*]}"
"""

_POINT = """\
# In an array each task is a run of its own: its keys are a line of $RUN/points, its folder is $RUN/LINE.
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    if ! read -ra point < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$RUN/points") && [ ${#point[@]} -eq 0 ]; then
        echo "$RUN/points has no line $SLURM_ARRAY_TASK_ID with the keys of this task" >&2
        exit 2
    fi
    keys+=("${point[@]}")
    RUN=$RUN/$SLURM_ARRAY_TASK_ID
fi
mkdir -p "$RUN" || exit
"""

_PLAN = """\
if [ ! -e "$RUN/plan.toml" ]; then  # a run that goes on keeps its plan
    status=0
    if [ ! -e "$MACHINE" ]; then
        "${launcher[@]}" chimera-mpi calibrate "$CONFIG" "${keys[@]}" "$@" -o "$MACHINE" || status=$?
    fi
    [ "$status" -ne 0 ] || chimera-mpi plan "$CONFIG" "${keys[@]}" "$@" --machine "$MACHINE" \\
        --workers "$SLURM_NTASKS" -o "$RUN/plan.toml" || status=$?
    if [ "$status" -ne 0 ]; then
        echo "$status" >"$RUN/status"
        exit "$status"
    fi
fi
CONFIG=$RUN/plan.toml
"""

_ADDED = 'log="$RUN/log.h5" checkpoint="$RUN/checkpoints" resume=auto time_limit=auto'  # keys of train; others go over

_TRAIN = (
    f"""\
"${{launcher[@]}}" chimera-mpi train "$CONFIG" \\
    {_ADDED} \\
"""
    """\
    "${keys[@]}" "$@" &
started=$!
sleep 1  # a child that is not srun yet may lose a signal
ranks=$started
[ -z "$warned" ] || kill -USR1 "$ranks"  # it came before there were ranks
while [ "$asked" ]; do  # a trap ends a wait
    asked=''
    wait "$ranks"
    status=$?
done

trap '' USR1 TERM
case $warned$status in yes138 | yes143) status=75 ;; esac  # ranks that did not listen yet have died of it
echo "$status" >"$RUN/status"
if [ "$status" -eq 75 ]; then
    job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    for _ in 1 2 3 4 5; do  # a controller that is busy may not answer at once
        state=$(squeue --noheader --jobs="$job" --format='%T %r') && case $state in
            RUNNING* | *TimeLimit) scontrol requeue "$job" ;;  # and not where it has been cancelled
        esac && told=yes && break
        sleep 5
    done
    [ -n "${told:-}" ] || echo "job $job could not be queued again: do it by sbatch" >&2
fi
exit "$status"
"""
)

_MEASURE = """\
exec "${launcher[@]}" chimera-mpi calibrate "$CONFIG" "${keys[@]}" "$@" -o "$MACHINE"
"""


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument(
        "source", metavar="PRESET|FILE.toml", nargs="?", default=default.config, help="of train; default: %(default)s"
    )
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help="over those of the file, such as depth=4")
    parser.add_argument("--job", choices=get_args(What), default=default.what, help="default: %(default)s")
    parser.add_argument("--nodes", type=count, default=default.nodes, metavar="N", help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=count, metavar="N", help="default: one for each GPU, else one")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="default: none")
    parser.add_argument("--cpus-per-rank", type=count, metavar="N", help="default: whole nodes, shared out")
    parser.add_argument("--time", default=default.time, metavar="TIME", help="limit of a start; default: %(default)s")
    parser.add_argument(
        "--warning-s",
        type=count,
        default=default.warning_s,
        metavar="S",
        help="before the limit, when a checkpoint is made and the job queued again; default: %(default)s",
    )
    parser.add_argument("--name", default=default.name, help="of the job; default: %(default)s")
    parser.add_argument("--env", default=default.env, metavar="FILE", help="your cluster's; default: %(default)s")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write no job, but for each line of keys on standard input why it would be refused, or an empty line",
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="further ones of sbatch: partition=gpu"
    )


def run(args: argparse.Namespace) -> int:
    settings = Settings(
        what=args.job,
        config=args.source,
        keys=tuple(args.keys),
        name=args.name,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node or args.gpus_per_node or 1,
        gpus_per_node=args.gpus_per_node or 0,
        cpus_per_rank=args.cpus_per_rank,
        time=args.time,
        warning_s=args.warning_s,
        env=args.env,
        options=tuple(args.option),
    )
    if args.check:
        for line in sys.stdin:
            print(_refusal(replace(settings, keys=(*settings.keys, *line.split()))), flush=True)
        return 0
    _refuse_what_would_fail(settings)
    print(job_script(settings), end="")
    return 0


def _refusal(settings: Settings) -> str:
    try:
        _refuse_what_would_fail(settings)
    except InputError as error:
        return str(error)
    return ""


def _refuse_what_would_fail(settings: Settings) -> None:
    """Raises InputError now for what the job would find only after it has waited in the queue."""
    if not os.path.isfile(settings.env):
        raise InputError(f"there is no {settings.env}: name your cluster's by --env, or run this where it lies")
    from ..config import check_together, fitting_depth, load
    from ..fits import check_on
    from ..schedule import width_of
    from ._asked import wanted_of

    if settings.what == "calibrate":
        load(settings.config, settings.keys)
        return
    config = load(settings.config, [*_ADDED.split(), *settings.keys])
    check_together(config)
    if settings.what == "train":
        fitting_depth(config, settings.ranks, check_on)
    else:
        for depth in wanted_of(settings.config, settings.keys).space.depths or ():
            width_of(settings.ranks, depth)
