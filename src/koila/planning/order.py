"""Order: the same calls, each as soon as it lets go of more than it makes.

*Takes* a body. *Gives* a body with the same calls in an order that respects their operands. Of the calls that could
run next the one that adds the fewest bytes runs, the earliest of equals. Greedy, not optimal: use it if its peak is
lower.
"""

from __future__ import annotations

from torch import fx

from koila.planning.body import SINKS, Body
from koila.planning.recompute import scheduled
from koila.planning.storages import Ref, Storages, storages_of


def reorder(body: Body) -> Body:
    """The body in the order that keeps the fewest bytes, call by call."""
    calls, storages = body.calls, storages_of(body)
    place = {node: number for number, node in enumerate(calls)}
    waiting = {node: {o for o in node.all_input_nodes if o in place} for node in calls}
    readers: dict[Ref, int] = {}
    """How many calls that have not run read each storage, or hold it."""
    for node in calls:
        for ref in _touched(node, storages):
            readers[ref] = readers.get(ref, 0) + 1

    def growth(node: fx.Node) -> int:
        made = sum(storages.num_bytes[ref] for ref in storages.made_by(node) if readers[ref] > 1)
        freed = sum(storages.num_bytes[ref] for ref in _touched(node, storages) if readers[ref] == 1)
        return made - freed

    ready = [node for node in calls if not waiting[node]]
    order: list[fx.Node] = []
    while ready:
        node = min(ready, key=lambda n: (n.target not in SINKS, growth(n), place[n]))
        ready.remove(node)
        order.append(node)
        for ref in _touched(node, storages):
            readers[ref] -= 1
        for user in node.users:
            if user in waiting and node in waiting[user]:
                waiting[user].discard(node)
                if not waiting[user]:
                    ready.append(user)
    return scheduled(body, (("run", node) for node in order))


def _touched(node: fx.Node, storages: Storages) -> set[Ref]:
    nodes = (node, *node.all_input_nodes)
    return {ref for each in nodes for ref in storages.refs[each] if ref in storages.num_bytes}
