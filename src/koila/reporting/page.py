"""One HTML page about a run: no network, no other file.

*Takes* a title, a text and a `View`. *Gives* the page as text. Data stand in it as JSON in which `<`, `>` and `&` are
written as escapes; the script of the page writes them as text, never as HTML. A content policy forbids any request.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from string import Template
from typing import Any

from koila.reporting.picture import COLORS, OTHER, kinds_of
from koila.reporting.view import View

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(title: str, text: str, view: View, allowed_bytes: int | None) -> str:
    """The page.

    Args:
        title: One line.
        text: What a person reads first; its lines stay lines.
        view: What is drawn and listed.
        allowed_bytes: The budget, drawn as a line.
    """
    data = {**_compact(view), "allowed": allowed_bytes, "colors": {**COLORS}, "other": OTHER, "kinds": kinds_of(view)}
    template = Template(files("koila.reporting").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(title), text=html.escape(text), data=_escaped(data))


def _escaped(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


class _Texts:
    """Texts that occur many times, written once."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


def _compact(view: View) -> dict[str, Any]:
    texts, kinds = _Texts(), kinds_of(view)
    points = [
        [point.part, texts(point.operator), texts(point.site), texts(point.largest), texts(point.largest_site)]
        + [point.kinds.get(kind, 0) for kind in kinds]
        for point in view.points
    ]
    rows = [
        [texts(each) for each in (row.name, row.operator, row.shape, row.type, row.phases, row.site)] + [row.num_bytes]
        for row in view.rows
    ]
    plans = [
        [each.projected_bytes, each.relative_time, each.text, each.is_chosen, each.allowed_bytes]
        for each in view.alternatives
    ]
    parts = [[part.title, part.times] for part in view.parts]
    return {"points": points, "rows": rows, "plans": plans, "parts": parts, "texts": list(texts.known)}
