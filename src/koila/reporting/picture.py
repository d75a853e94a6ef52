"""A picture of the memory of a run, for notebooks: an SVG without scripts.

*Takes* a `View`. *Gives* HTML in which everything that comes from the user's program is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

from koila._bytes import format_bytes
from koila.reporting.view import View

COLORS = {
    "objects and drawn numbers": "#6d6875",
    "gradients": "#c2512f",
    "results": "#8a5a9e",
    "merges": "#b8902a",
    "kept values": "#3f7f8c",
    "arena": "#4a6fa5",
    "activations": "#5b84c4",
    "workspace": "#9aa5b1",
}
"""From the bottom of the picture to its top; other kinds come last."""
OTHER = "#777777"
WIDTH, HEIGHT = 720, 160
NOTHING = View()


def kinds_of(view: View) -> list[str]:
    """The kinds that a view has, from the bottom of a picture to its top."""
    found = dict.fromkeys(kind for point in view.points for kind in point.kinds)
    return [kind for kind in COLORS if kind in found] + [kind for kind in found if kind not in COLORS]


def picture(view: View, allowed_bytes: int | None) -> str:
    """The bytes of each kind from the first step to the last, one on the other, with the budget as a line."""
    if not view.points:
        return ""
    most = max(max(point.num_bytes for point in view.points), allowed_bytes or 0)
    areas = "".join(_areas(view, most))
    line = ""
    if allowed_bytes is not None:
        y = _height(allowed_bytes, most)
        line = f'<line x1="0" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#b00020" stroke-dasharray="6 4"/>'
    legend = " ".join(map(_sign, kinds_of(view)))
    budget = "" if allowed_bytes is None else f", budget {format_bytes(allowed_bytes)} (dashed)"
    peak = format_bytes(max(point.num_bytes for point in view.points))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="max-width:{WIDTH}px;width:100%" role="img" '
        f'aria-label="memory over time">{areas}{line}</svg>'
        f'<div style="font-size:90%">peak {peak}{html.escape(budget)} · {legend}</div>'
    )


def _sign(kind: str) -> str:
    square = f'<span style="color:{COLORS.get(kind, OTHER)}">■</span>'
    return f'<span style="white-space:nowrap">{square} {html.escape(kind)}</span>'


def _areas(view: View, most: int) -> Iterator[str]:
    below = [0] * len(view.points)
    for kind in kinds_of(view):
        above = [low + point.kinds.get(kind, 0) for low, point in zip(below, view.points, strict=True)]
        corners = " ".join((*_line(above, most), *reversed(_line(below, most))))
        yield f'<polygon fill="{COLORS.get(kind, OTHER)}" points="{corners}"/>'
        below = above


def _line(heights: list[int], most: int) -> list[str]:
    """The corners of steps, from the left to the right."""
    step = WIDTH / len(heights)
    ends = ((x, _height(y, most)) for place, y in enumerate(heights) for x in (place * step, (place + 1) * step))
    return [f"{x:.1f},{y}" for x, y in ends]


def _height(num_bytes: int, most: int) -> str:
    return f"{HEIGHT * (1 - num_bytes / max(most, 1) * 0.96):.1f}"


def notebook(text: str, view: View = NOTHING, allowed_bytes: int | None = None) -> str:
    """What a notebook shows: the picture, if there is one, and the text as it stands."""
    return f"{picture(view, allowed_bytes)}<pre>{html.escape(text)}</pre>"
