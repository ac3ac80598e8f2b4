"""What a run is to do: a preset or a TOML file, and key=value overrides, checked."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from .errors import InputError, cut, shown
from .schedule import (
    ALIASES,
    SCHEMES,
    STREAMS,
    OpCosts,
    Schedule,
    accumulated,
    build,
    check,
    fit_depth,
    nearest,
    options_of,
    ordered_for,
    width_of,
    without_updates,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

DEFAULT_DATA = Path("data/corpus.h5")
FLUSH_STEPS = 20  # between the flushes of a stream that no evaluation asks for

Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]
Number = Annotated[int, Field(ge=0, le=10**9, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=10**9)]
Switch = Annotated[bool, Field(strict=True)]


class Config(BaseModel):
    """A run. Times in seconds, sizes in samples, lengths in tokens; every key may be set in a file or as key=value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # the model
    model: str = Field("gpt", pattern=r"^(gpt|bert|[\w.]+:\w+)$", description="gpt, bert, or package.module:build")
    layers: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 12
    hidden: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 768
    heads: Count = 12
    vocabulary: Count = 257
    positions: Count = 1024
    sequence_length: Count = 1024
    tied: Switch = True
    dropout: float = Field(0.0, ge=0, lt=1)

    # the schedule; the number of replicas is the number of ranks / depth
    scheme: str = "1f1b"
    depth: Count = 1
    micro_batches: Count = Field(4, description="of a step of one pipeline group")
    accumulate: Count = Field(1, description="times that a step does its micro-batches before it updates")
    order: Literal["drawn", "costs"] = Field(
        "drawn", description="of a worker's ops: as the scheme is drawn, or the best found for what its stages cost"
    )
    sync: Literal["lazy", "eager", "eager_opt"] = "eager_opt"
    pairs: Count | None = Field(None, description="pairs of pipelines of chimera and chimera_zb")
    concat: Literal["direct", "doubling", "halving"] | None = Field(None, description="how chimera joins its units")
    chunks: Count | None = Field(None, description="stages a worker of interleaved, interleaved_zb")
    waves: Count | None = Field(None, description="of hanayo")
    partition: Literal["uniform", "parameters", "flops", "measured"] | tuple[Count, ...] = Field(
        "uniform", description="what the stages share out evenly; or the layers that stages but the first begin with"
    )
    recompute: Literal["none", "stage", "layer"] | Count = Field(
        "none", description="what is forgotten after a forward; a number: so many layers at a time"
    )

    # the batch
    micro_batch_size: Count = 8
    mini_batch_size: Count | None = Field(None, description="of a step of all groups; else it follows")

    # the optimizer
    steps: Count = 100
    optimizer: Literal["adamw", "sgd", "lamb", "adafactor"] = "adamw"
    optimizer_sharding: Literal["none", "replicas"] = Field(
        "none", description="whether each replica of a stage has all of the optimizer's state, or a share"
    )
    learning_rate: float = Field(3e-4, gt=0)
    minimum_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: Number = 10
    weight_decay: float = Field(0.1, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    clip: float | None = Field(
        1.0, gt=0, description="bound of the global gradient norm; asynchronous schemes have none unless it is given"
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        "fp32", description="bf16 and fp16 keep masters and sums in fp32"
    )
    loss_scale: float | None = Field(
        None,
        gt=0,
        le=2**24,
        description="of fp16 at the start; by default 65536 / tokens of a micro-batch, as losses are sums",
    )
    shared_sums: Switch = Field(
        True, description="replicas on a node sum large gradients in memory that they share, if /dev/shm has room"
    )
    bucket_bytes: Count = Field(4 << 20, description="of gradients that are summed over replicas together")
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="what is done at a loss or gradients of nan or inf: stop before the update, or do without it",
    )
    seed: Number = 0

    # files and figures
    data: Path | None = Field(None, description=f"token file; by default {DEFAULT_DATA}, made when it is missing")
    log: str | None = Field(
        "auto", description="a file that must not exist, unless a run is resumed; none; or auto for runs/TIME-SCHEME.h5"
    )
    checkpoint: Path | None = Field(
        None, description="folder for checkpoints; one is written at the end, and when the run is stopped"
    )
    checkpoint_every: Count | None = Field(None, description="steps between checkpoints, beside those")
    checkpoint_keep: Count = Field(2, description="how many of the last checkpoints stay")
    resume: str | None = Field(
        None, description="none; auto: from the last whole checkpoint, if there is one; or a folder: from there"
    )
    eval_every: Count | None = Field(
        20, description="steps between evaluations, beside one at the end; none: not even that"
    )
    eval_mini_batches: Count = 2
    check_replicas: Count | None = Field(None, description="steps between comparisons of all replicas, to the bit")
    spans_every: Count = Field(
        10, description="steps between those whose spans are logged, at first; later ones are rarer"
    )
    profile: Number | str | None = Field(
        None, description="steps, numbered as in the log, that torch.profiler records: such as 10-12; beside the log"
    )

    # the end
    time_limit: Literal["auto"] | Seconds | None = Field(
        None, description="seconds after which to stop, with a checkpoint; auto: before the end of the Slurm job"
    )
    watchdog_s: Literal["auto"] | Seconds | None = Field(
        "auto", description="how long no op may begin or end within a step; auto: a multiple of a step's time"
    )

    # deaths of ranks
    survive: Literal["replicas"] | None = Field(
        None, description="replicas: a run goes on without ranks that die, from the copies of their stages (ULFM)"
    )
    spares: Number = Field(0, description="ranks that stand by and take the places of those that die")
    survive_scheme: str | None = Field(
        None, description="what to go on with where the scheme itself cannot be had on the ranks that are left"
    )

    # the machine
    machine: str | None = Field(
        None, description="what steps are predicted by: a file of calibrate, or the name of a machine that comes along"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where torch sees one")
    device_aware_mpi: Literal["auto"] | Switch = Field(
        "auto", description="whether MPI takes memory of GPUs; otherwise messages go through pinned host memory"
    )
    threads: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = Field(
        None, description="of each rank; else cores of the node / ranks on it"
    )
    keep_freed_memory: Switch = Field(True, description="let the C library keep it for the next tensors of that size")
    spin_s: float | None = Field(None, ge=0, description="how long a wait polls without a pause; else chosen")
    progress: Literal["auto", "poll", "thread"] = Field(
        "auto",
        description="what moves messages while a rank computes: calls between its ops, or a thread; auto: "
        "a thread where there are several nodes",
    )
    receives_ahead: Count = 4
    message_limit_bytes: Count = Field(10**9, description="longer messages travel in pieces")
    synchronous_sends: Switch = Field(False, description="for tests: no send completes before its receive")
    verify_messages: Switch = Field(False, description="compare the bytes of each message with those expected")

    @model_validator(mode="before")
    @classmethod
    def _let_streams_stream(cls, values: dict[str, Any]) -> dict[str, Any]:
        """To clip, each of their updates would wait for all workers."""
        return {"clip": None, **values} if values.get("scheme") in STREAMS else values

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_what_is_not_utf8(cls, value: Any) -> Any:
        """Names of files may have any bytes, but a log and a checkpoint write down the configuration in UTF-8."""
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise PydanticCustomError("not_utf8", "it is not UTF-8: give another name")
        return value

    @property
    def scheme_options(self) -> dict[str, Any]:
        """What the user set of the scheme's own options."""
        options = {name: getattr(self, name) for name in ("pairs", "concat", "chunks", "waves")}
        return {name: value for name, value in options.items() if value is not None}


class Steps(NamedTuple):
    """A schedule and the number of steps that it covers: one, or those of a stream up to its next flush."""

    schedule: Schedule
    steps: int

    @property
    def micro_batches(self) -> int:
        """Of one step of one pipeline group."""
        return self.schedule.micro_batches // self.steps


_RANGE = re.compile(r"(?:steps? +)?(\d{1,9})(?: *- *(\d{1,9}))?")


def profiled(config: Config) -> range:
    """The steps that `profile` asks for. Raises InputError if they are not among those of the run."""
    if config.profile is None:
        return range(0)
    found = _RANGE.fullmatch(str(config.profile).strip())
    if found is None:
        raise InputError(f"profile={config.profile!r} is no range of steps: give one such as 10-12, or a single step")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise InputError(f"profile={config.profile} ends before it begins: try profile={last}-{first}")
    if last >= config.steps:
        raise InputError(
            f"profile={config.profile}: the steps of this run are 0 to {config.steps - 1}: "
            f"take some of those, or set steps={last + 1} or more"
        )
    return range(first, last + 1)


def check_together(config: Config) -> None:
    """Raises InputError if two values do not go together."""
    if config.minimum_learning_rate > config.learning_rate:
        raise InputError(
            f"minimum_learning_rate={config.minimum_learning_rate} is above learning_rate={config.learning_rate}: "
            f"set it to {config.learning_rate} or less"
        )
    if config.checkpoint is None and config.checkpoint_every is not None:
        raise InputError(f"checkpoint_every={config.checkpoint_every} needs a folder: give checkpoint=FOLDER")
    if config.checkpoint is None and config.resume == "auto":
        raise InputError("resume=auto looks in the folder for checkpoints: give checkpoint=FOLDER")
    _check_survival(config)
    if config.on_nan == "skip" and config.scheme in STREAMS:
        raise InputError(f"{config.scheme} updates stage by stage, and skipping an update needs all: set on_nan=stop")
    if profiled(config) and config.log is None:
        raise InputError(f"profile={config.profile} is written beside the log, and log=none: give log=FILE")


def _check_survival(config: Config) -> None:
    if config.survive is None:
        for key in ("spares", "survive_scheme"):
            if value := getattr(config, key):
                raise InputError(f"{key}={value} is of use with survive=replicas only: set that, or leave out {key}")
        return
    for scheme in filter(None, (config.scheme, config.survive_scheme)):
        if scheme not in (known := [*SCHEMES, *ALIASES]):
            raise InputError(f"unknown scheme {scheme!r}: {nearest(scheme, known)}")
        if scheme in STREAMS:
            raise InputError(
                f"{scheme} updates stage by stage, so that no moment has one step's weights on all ranks: set "
                "survive=none, or take a scheme that flushes, such as chimera"
            )
    if config.optimizer_sharding == "replicas":
        raise InputError(
            "optimizer_sharding=replicas keeps each share of the optimizer's state on one rank, with which it would "
            "die: set optimizer_sharding=none, or survive=none"
        )


def fitting_depth(config: Config, ranks: int, make: Callable[[Config, int], T]) -> T:
    """What `make` makes of `config` on those of `ranks` ranks that are not spare. Raises InputError, which says of a
    depth that does not fit which would."""

    def with_depth(depth: int, workers: int) -> T:
        return make(config.model_copy(update={"depth": depth}), workers)

    return fit_depth(config.depth, ranks, config.spares, with_depth)


def schedule_on(config: Config, workers: int) -> Steps:
    """The schedule that `config` asks for, if it can be had on so many ranks. Raises InputError."""
    width_of(workers, config.depth)
    return schedule_of(config)


def schedule_of(config: Config, costs: OpCosts | None = None, done: int = 0) -> Steps:
    """What `config` asks for, for the steps after the first `done`. A stream flushes as often as it is evaluated, or a
    little more often.

    Backward halving does twice the micro-batches, of half the size. With `costs` the ops of a flush are put in the
    best order found for them. Raises InputError.
    """
    check_together(config)
    micro_batches, options = config.micro_batches, config.scheme_options
    if config.concat == "halving":
        micro_batches *= 2
    steps = 1
    if config.scheme in STREAMS:
        steps = steps_of_stream(config, done)
    if config.scheme == "pipedream_2bw":
        if micro_batches < config.depth:
            raise InputError(
                f"pipedream_2bw with depth={config.depth} needs as many micro-batches a step, not {micro_batches}: "
                f"set micro_batches={config.depth}"
            )
        options["every"] = micro_batches
    if config.accumulate > 1 and config.scheme in STREAMS:
        raise InputError(
            f"{config.scheme} has no flush to accumulate over: set micro_batches={micro_batches * config.accumulate}"
        )
    schedule = build(config.scheme, config.depth, micro_batches * steps, sync=config.sync, **options)
    if config.accumulate > 1:
        schedule = accumulated(schedule, config.accumulate, config.sync)
    if costs is not None and config.scheme not in STREAMS:
        schedule = ordered_for(costs, without_updates(schedule), config.sync)
    return Steps(check(schedule), steps)


def steps_of_stream(config: Config, done: int) -> int:
    """Between its flushes: where `done` is one of the whole run's flushes, those stay."""

    def longest(left: int) -> int:
        return max(n for n in range(1, min(config.eval_every or FLUSH_STEPS, left) + 1) if left % n == 0)

    steps = longest(config.steps)
    return longest(config.steps - done) if done % steps else steps


def load(source: str, overrides: Iterable[str] = ()) -> Config:
    """The configuration that `source`, a preset or a TOML file, and `key=value` overrides make.

    Raises InputError: one line with the key, the value and what it may be.
    """
    asked = dict(_key_value(override) for override in overrides)
    values = _read(source)
    if "mini_batch_size" in asked:  # one size follows from the other
        values.pop("micro_batch_size", None)
    config = checked({**values, **asked})
    _check_options(config, source, asked)
    return config


def _check_options(config: Config, source: str, asked: Mapping[str, Any]) -> None:
    """Raises InputError if an option is not of the scheme, as where that is another than the file's."""
    if (scheme := ALIASES.get(config.scheme, config.scheme)) not in SCHEMES:
        return
    for key, value in config.scheme_options.items():
        if key not in options_of(scheme):
            what = f"{key}={value} is no option of scheme={config.scheme}"
            raise InputError(
                f"{what}: leave it out" if key in asked else f"{what}, but stands in {source}: give {key}=none as well"
            )


def checked(values: Mapping[str, Any]) -> Config:
    """The configuration of these keys. Raises InputError: one line with the key, the value and what it may be."""
    try:
        return Config(**values)
    except ValidationError as error:
        raise InputError(_explain(error)) from None


def presets() -> list[str]:
    """The names of the configurations that come with the package."""
    return sorted(Path(entry.name).stem for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def _folder():
    return files(__package__) / "presets"


def _read(source: str) -> dict[str, Any]:
    if source in presets():
        return tomllib.loads((_folder() / f"{source}.toml").read_text(encoding="utf-8"))
    path = Path(source)
    if not os.path.isfile(path):
        raise InputError(f"{source!r} is neither a preset nor a file: {nearest(source, presets())}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{source} is not a TOML file: {error}") from None


def _key_value(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"{cut(repr(override))} is not key=value: give, for example, depth=4")
    if not text:
        raise InputError(f"{cut(repr(override))} has no value: give one, or leave the key out")
    return key, _value(key, text)


def _value(key: str, text: str) -> Any:
    """A TOML value, or a bare word. A name is one of the latter, though it may look like a number or a date."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    if _is_name(key) and text[0] not in "\"'":
        return text
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, or too much of it
        return text
    return read["value"] if len(read) == 1 else text


def _is_name(key: str) -> bool:
    """Whether a key takes nothing but the name of something."""
    if key not in Config.model_fields:
        return False
    annotation = Config.model_fields[key].annotation
    return {*(get_args(annotation) or (annotation,))} <= {str, Path, type(None)}


def _explain(error: ValidationError) -> str:
    first, *others = error.errors()
    key, value = str(first["loc"][0]), first["input"]
    if first["type"] == "literal_error" and not isinstance(value, str):  # which may be a number or the like, too
        first = next((other for other in others if other["loc"][0] == key), first)
    if first["type"] == "extra_forbidden":
        return f"unknown key {cut(repr(key))}: {nearest(key, Config.model_fields)}"
    field = Config.model_fields[key]
    or_none = ", or none" if field.default is not None and type(None) in get_args(field.annotation) else ""
    reason = first["msg"][0].lower() + first["msg"][1:]
    return f"{key}={shown(value, partial(spelt, repr))}: {reason}; try {key}={spelt(str, field.default)}{or_none}"


def spelt(words: Callable[[Any], str], value: Any) -> str:
    """A value in these `words`, but none, true and false as they are given on a command line."""
    return words(value).lower() if value is None or isinstance(value, bool) else words(value)
