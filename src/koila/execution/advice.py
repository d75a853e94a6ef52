"""What a run warns about, once per place in the user's code; see `koila._warnings`.

*Takes* a program that is about to run without a budget. *Gives* a warning if it was recorded inside one.
"""

from __future__ import annotations

from collections.abc import Sequence

from koila._budget import last_closed
from koila._warnings import warn_once
from koila.ir.graph import Graph, collect
from koila.ir.node import Value
from koila.ir.source import user_site


def warn_of_closed_scope(graph: Graph, values: Sequence[Value]) -> None:
    """The scope at *run* time holds: say it if the calls were recorded in one that is closed by now.

    Args:
        graph: Everything that runs, in the order in which it was recorded.
        values: What was asked for.
    """
    scope = last_closed()
    if scope is None or graph.nodes[0].sequence > scope.closed:
        return
    asked = collect([value for value in values if value.real is None], []).nodes
    inside = next((node for node in asked if scope.opened < node.sequence < scope.closed), None)
    if inside is not None:
        site = user_site()
        warn_once(
            "a scope closed too early",
            f"{inside.name}, recorded at {inside.site} inside the koila.budget(...) of {scope.place}, runs here, after "
            "that scope was closed: its budget does not hold",
            "move this line into the scope, or give the budget to the inputs: koila.lazy(x, budget=...)",
            site.file,
            site.line,
        )
