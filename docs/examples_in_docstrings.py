"""Examples in docstrings become blocks of code on the site.

*Takes* the docstrings that mkdocstrings reads. *Gives* them with each run of `>>>` lines, and what it prints, fenced.
"""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """A docstring with its examples in fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    lines: list[str] = []
    is_open = False
    for line in text.splitlines():
        if not is_open and line.startswith(">>>"):
            lines.append("```pycon")
            is_open = True
        elif is_open and not line.strip():
            lines.append("```")
            is_open = False
        lines.append(line)
    return "\n".join([*lines, *(["```"] if is_open else [])])


class ExamplesInDocstrings(griffe.Extension):
    """Changes each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
