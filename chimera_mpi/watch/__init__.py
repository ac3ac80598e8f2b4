"""What can be seen of a run in progress: a view of its log at a moment, and the view as lines of text.

Pure: `commands/watch.py` reads and shows.
"""

from .text import Line, Part, curve, lines, plain
from .view import SILENT_S, STARTING_S, Cause, Rank, State, View, WorkerView, Writer, blames, view_of

__all__ = [
    "SILENT_S",
    "STARTING_S",
    "Cause",
    "Line",
    "Part",
    "Rank",
    "State",
    "View",
    "WorkerView",
    "Writer",
    "blames",
    "curve",
    "lines",
    "plain",
    "view_of",
]
