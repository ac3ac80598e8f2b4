"""What a run is to do: a preset or a TOML file, and key=value overrides, checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from .errors import InputError
from .schedule import STREAMS, Schedule, build, check, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_DATA = Path("data/corpus.h5")


class Config(BaseModel):
    """A run. Times in seconds, sizes in samples, lengths in tokens; every key may be set in a file or as key=value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # the model
    model: Literal["gpt"] = "gpt"
    layers: int = Field(12, ge=1)
    hidden: int = Field(768, ge=1)
    heads: int = Field(12, ge=1)
    vocabulary: int = Field(257, ge=2)
    positions: int = Field(1024, ge=1)
    sequence_length: int = Field(1024, ge=1)
    tied: bool = True
    dropout: float = Field(0.0, ge=0, lt=1)

    # the schedule; the number of replicas is the number of ranks / depth
    scheme: str = "1f1b"
    depth: int = Field(1, ge=1)
    micro_batches: int = Field(4, ge=1, description="of a step of one pipeline group")
    sync: Literal["lazy", "eager", "eager_opt"] = "eager_opt"
    pairs: int | None = Field(None, ge=1, description="pairs of pipelines of chimera")
    concat: Literal["direct", "doubling", "halving"] | None = Field(None, description="how chimera joins its units")
    chunks: int | None = Field(None, ge=1, description="stages a worker of interleaved")
    waves: int | None = Field(None, ge=1, description="of hanayo")
    partition: Literal["uniform", "parameters", "flops"] | tuple[PositiveInt, ...] = Field(
        "uniform", description="what the stages share out evenly; or the layers that stages but the first begin with"
    )
    recompute: Literal["none", "stage", "layer"] | PositiveInt = Field(
        "none", description="what is forgotten after a forward; a number: so many layers at a time"
    )

    # the batch
    micro_batch_size: int = Field(8, ge=1)
    mini_batch_size: int | None = Field(None, ge=1, description="of a step of all groups; else it follows")

    # the optimizer
    steps: int = Field(100, ge=1)
    optimizer: Literal["adamw", "sgd", "lamb", "adafactor"] = "adamw"
    learning_rate: float = Field(3e-4, gt=0)
    minimum_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: int = Field(10, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    clip: float | None = Field(1.0, gt=0, description="bound of the global gradient norm, or none")
    precision: Literal["fp32", "bf16", "fp64"] = Field("fp32", description="bf16 keeps masters and sums in fp32")
    seed: int = Field(0, ge=0)

    # files and figures
    data: Path | None = Field(None, description=f"token file; by default {DEFAULT_DATA}, made when it is missing")
    log: str | None = Field("auto", description="run log, a file that must not exist; none, or auto for runs/TIME-SCHEME.h5")
    eval_every: int = Field(20, ge=1, description="steps")
    eval_mini_batches: int = Field(2, ge=1)
    spans_every: int = Field(10, ge=1, description="steps between those whose spans are logged")

    # the machine
    threads: int | None = Field(None, ge=1, description="of each rank; else cores of the node / ranks on it")
    spin_s: float | None = Field(None, ge=0, description="how long a wait polls without a pause; else chosen")
    receives_ahead: int = Field(4, ge=1)
    message_limit_bytes: int = Field(1 << 30, ge=1, description="longer messages travel in pieces")
    synchronous_sends: bool = Field(False, description="for tests: no send completes before its receive")
    verify_messages: bool = Field(False, description="compare the bytes of each message with those expected")

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


def schedule_of(config: Config) -> Steps:
    """What `config` asks for. A stream flushes as often as it is evaluated, or a little more often.

    Backward halving does twice the micro-batches, of half the size. Raises InputError.
    """
    micro_batches, options = config.micro_batches, config.scheme_options
    if config.concat == "halving":
        micro_batches *= 2
    steps = 1
    if config.scheme in STREAMS:
        steps = max(n for n in range(1, config.eval_every + 1) if config.steps % n == 0)
    if config.scheme == "pipedream_2bw":
        if micro_batches < config.depth:
            raise InputError(
                f"pipedream_2bw with depth={config.depth} needs as many micro-batches a step, not {micro_batches}: "
                f"set micro_batches={config.depth}"
            )
        options["every"] = micro_batches
    schedule = build(config.scheme, config.depth, micro_batches * steps, sync=config.sync, **options)
    return Steps(check(schedule), steps)


def load(source: str, overrides: Iterable[str] = ()) -> Config:
    """The configuration that `source`, a preset or a TOML file, and `key=value` overrides make.

    Raises InputError: one line with the key, the value and what it may be.
    """
    asked = dict(_key_value(override) for override in overrides)
    values = _read(source)
    if "mini_batch_size" in asked:  # one size follows from the other
        values.pop("micro_batch_size", None)
    try:
        return Config(**{**values, **asked})
    except ValidationError as error:
        raise InputError(_explain(error)) from None


def presets() -> list[str]:
    """The names of the configurations that come with the package."""
    return sorted(Path(entry.name).stem for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def _folder():
    return files(__package__) / "presets"


def _read(source: str) -> dict[str, Any]:
    if source in presets():
        return tomllib.loads((_folder() / f"{source}.toml").read_text())
    path = Path(source)
    if not path.is_file():
        raise InputError(f"'{source}' is neither a preset nor a file: {nearest(source, presets())}")
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{source} is not a TOML file: {error}") from None


def _key_value(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise InputError(f"'{override}' is not key=value: give, for example, depth=4")
    return key, _value(text)


def _value(text: str) -> Any:
    """A TOML value, or a bare word."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"unknown key '{key}': {nearest(key, Config.model_fields)}"
    return f"{key}={first['input']}: {first['msg'][0].lower()}{first['msg'][1:]}"
