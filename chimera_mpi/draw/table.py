"""A table: in characters that keep to a width, or as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap
from typing import NamedTuple

_LEAST = 14  # columns that words of the last column are wrapped to, at least


class Table(NamedTuple):
    """Words by rows; the first column names the row. What is not a number stands to the left."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def table_text(table: Table, width: int = 80) -> str:
    """At most `width` columns wide where that can be: words at the end of a row are wrapped, a table of numbers goes
    on below with its first column repeated."""
    lines = [*(wrap(table.title, max(width, _LEAST)) if table.title else []), *_body(table, width)]
    return "\n".join([*lines, *(wrap(table.note, max(width, _LEAST)) if table.note else [])])


def _body(table: Table, width: int) -> Iterator[str]:
    widths = [max(map(len, column)) for column in _columns(table)]
    right = _numeric(table)
    if not right[-1]:
        beside = sum(widths[:-1]) + 2 * (len(widths) - 1)
        room = width - (beside if beside + _LEAST <= width else widths[0] + 2)
        widths[-1] = min(widths[-1], max(room, _LEAST))
    for number, part in enumerate(_parts(widths, width)):
        if number:
            yield ""
        for row in [table.heads, *table.rows]:
            yield from _row(row, part, widths, right)


def _columns(table: Table) -> list[tuple[str, ...]]:
    return list(zip(table.heads, *table.rows, strict=True))


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers, or nothing else than dashes beside them."""
    return [
        at > 0 and all(cell[:1].isdigit() or cell[:1] in "+-" for cell in column[1:])
        for at, column in enumerate(_columns(table))
    ]


def _parts(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns that stand side by side, the first one in each."""
    parts: list[list[int]] = [[0]]
    used = widths[0]
    for at, need in enumerate(widths[1:], 1):
        if used + 2 + need > width and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0]
        parts[-1].append(at)
        used += 2 + need
    return parts


def _row(row: Sequence[str], part: Sequence[int], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    folded = {at: wrap(row[at], max(widths[at], 1), break_on_hyphens=False) or [""] for at in part}
    for line in range(max(map(len, folded.values()))):
        cells = (words[line] if line < len(words) else "" for words in folded.values())
        aligned = (
            f"{cell:>{widths[at]}}" if right[at] else f"{cell:{widths[at]}}"
            for cell, at in zip(cells, part, strict=True)
        )
        yield "  ".join(aligned).rstrip()


def table_html(table: Table) -> str:
    right = _numeric(table)

    def row(cells: Sequence[str], tag: str) -> str:
        body = "".join(
            f"<{tag}{' class=number' if to_right else ''}>{escape(cell)}</{tag}>"
            for cell, to_right in zip(cells, right, strict=True)
        )
        return f"<tr>{body}</tr>"

    lines = [
        "<figure>",
        *([f"<figcaption>{escape(table.title)}</figcaption>"] if table.title else []),
        '<div class="table" tabindex="0"><table>',
        f"<thead>{row(table.heads, 'th')}</thead><tbody>",
        *(row(cells, "td") for cells in table.rows),
        "</tbody></table></div>",
        *([f'<p class="note">{escape(table.note)}</p>'] if table.note else []),
        "</figure>",
    ]
    return "\n".join(lines)
