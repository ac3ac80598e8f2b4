"""Pipeline schedules as values. Needs nothing beyond the standard library."""

from .check import check
from .collector import paused_collector
from .compatible import check_compatible
from .depths import UnfitDepth, fit_depth, width_of
from .list_scheduler import Plan, list_schedule, ordered_for
from .ops import (
    COMPUTE,
    FREES,
    HOLDS,
    Deadlock,
    Kind,
    Message,
    Op,
    Place,
    Schedule,
    ScheduleError,
    forward_only,
    from_elsewhere,
    messages,
    needs,
    repeat,
    walk,
    without_updates,
)
from .schemes import ALIASES, SCHEMES, STREAMS, build, nearest, options_of, used_versions
from .search import Found, Progress, improve, lower_bound
from .sync import SYNCS, accumulated, completing
from .text import dumps, loads, read
from .timing import OpCosts

__all__ = [
    "ALIASES",
    "COMPUTE",
    "FREES",
    "HOLDS",
    "SCHEMES",
    "STREAMS",
    "SYNCS",
    "Deadlock",
    "Found",
    "Kind",
    "Message",
    "Op",
    "OpCosts",
    "Place",
    "Plan",
    "Progress",
    "Schedule",
    "ScheduleError",
    "UnfitDepth",
    "accumulated",
    "build",
    "check",
    "check_compatible",
    "completing",
    "dumps",
    "fit_depth",
    "forward_only",
    "from_elsewhere",
    "improve",
    "list_schedule",
    "loads",
    "lower_bound",
    "messages",
    "nearest",
    "needs",
    "options_of",
    "ordered_for",
    "paused_collector",
    "read",
    "repeat",
    "used_versions",
    "walk",
    "width_of",
    "without_updates",
]
