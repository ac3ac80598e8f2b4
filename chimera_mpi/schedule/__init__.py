"""Pipeline schedules as values. Needs nothing beyond the standard library."""

from .check import check
from .ops import COMPUTE, Deadlock, Kind, Message, Op, Place, Schedule, ScheduleError, messages, needs, walk
from .schemes import ALIASES, SCHEMES, build, nearest, options_of, used_versions
from .sync import SYNCS

__all__ = [
    "ALIASES",
    "COMPUTE",
    "SCHEMES",
    "SYNCS",
    "Deadlock",
    "Kind",
    "Message",
    "Op",
    "Place",
    "Schedule",
    "ScheduleError",
    "build",
    "check",
    "messages",
    "nearest",
    "needs",
    "options_of",
    "used_versions",
    "walk",
]
