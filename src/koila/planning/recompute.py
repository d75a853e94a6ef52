"""Recomputation and offload inside a body: values are let go, and computed again or fetched where they are needed next.

*Takes* a body and the bytes it may use. *Gives* a body with the same results in which some calls stand twice, or some
values go to the shelf and come back, or None if that does not suffice. The schedule is made offline by playing the
body through: when a call does not fit, the value that is cheapest to have again, per byte and per step until its next
use, is let go. Greedy, not optimal; deterministic.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from koila.planning.body import SINKS, Body, has_effects, sink_value
from koila.planning.cost import CALL, seconds
from koila.planning.reuse import candidates, is_new
from koila.planning.shelf import shelve, unshelve
from koila.planning.storages import Ref, inside, shared_storages, storages_of

_PATIENCE = 6
"""Give up when a body has grown this many times."""
_FAR = 64
"""So many calls are done again for one value at most."""
_SHELF_BYTES = 1e9
"""Bytes per second to and from the shelf."""

Step = tuple[str, fx.Node]
"""`run` a call, `shelve` its value, or `unshelve` it."""


class _Play:
    """The state of the body that is played through."""

    def __init__(self, body: Body, limit: int, offload: bool, again: bool) -> None:
        self.body, self.limit, self.offload, self.again = body, limit, offload, again
        self.shelved: set[fx.Node] = set()
        self.calls = body.calls
        self.storages, self.shared = storages_of(body), shared_storages(body)
        self.uses: dict[fx.Node, list[int]] = {node: [] for node in self.calls}
        for step, node in enumerate(self.calls):
            for operand in node.all_input_nodes:
                if operand in self.uses:
                    self.uses[operand].append(step)
        self.order: list[Step] = []
        """What runs, in order; a call may stand in it several times."""
        self.alive: set[fx.Node] = set()
        self.holders: dict[Ref, set[fx.Node]] = {}
        self.now = 0
        self.step = 0
        self.stored: set[fx.Node] = set()
        """Values that a section stores: they cannot be let go."""

    def run(self) -> list[Step] | None:
        for step, node in enumerate(self.calls):
            self.step = step
            needed = self._missing(node)
            for number, each in enumerate(needed):
                if not self._execute(each, needed[number:]):
                    return None
            if len(self.order) > _PATIENCE * len(self.calls):
                return None
            for each in (*needed, *self._inputs(needed)):
                if each in self.alive and self._next_use(each) is None and each not in self.stored:
                    self._drop(each)
        return self.order

    def _inputs(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [operand for node in nodes for operand in node.all_input_nodes if operand in self.uses]

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        """What must run for a call, and the call itself: its operands that are not there, theirs first."""
        found: dict[fx.Node, None] = {}
        pending = [(node, False)]
        while pending:
            each, opened = pending.pop()
            if each in found or (each in self.alive and each is not node):
                continue
            if opened or each in self.shelved:
                found[each] = None
            else:
                pending.append((each, True))
                pending += [(operand, False) for operand in each.all_input_nodes if operand in self.uses]
        return list(found)

    def _execute(self, node: fx.Node, rest: list[fx.Node]) -> bool:
        fetched = node in self.shelved
        pinned = set(self._inputs(each for each in rest if each not in self.shelved))
        refs = self.storages.refs[node] if fetched else self.storages.made_by(node)
        need = sum(self.storages.num_bytes[ref] for ref in refs) + (0 if fetched else inside(node))
        if not fetched and self._writes_over(node, rest[1:]):
            need = inside(node)
        while self.now + need > self.limit:
            victim = self._victim(pinned)
            if victim is None:
                return False
            self._evict(victim)
        self.order.append(("unshelve" if fetched else "run", node))
        if node.target in SINKS:
            if node.target is sink_value and self.body.chunk is None:
                self.stored.add(node.args[2])  # type: ignore[arg-type]
            return True
        if not fetched and self._writes_over(node, rest[1:]):
            self._drop(next(o for o in candidates(node) if self._dies(o, node, rest[1:])))
        self.alive.add(node)
        for ref in self.storages.refs[node]:
            if ref in self.storages.num_bytes:
                holders = self.holders.setdefault(ref, set())
                if not holders:
                    self.now += self.storages.num_bytes[ref]
                holders.add(node)
        # What only the repeated calls needed goes at once.
        for operand in [] if fetched else self._inputs([node]):
            awaited = operand in self.stored or self._next_use(operand, after=self.step - 1) is not None
            if operand in self.alive and not awaited and operand not in self._inputs(rest[1:]):
                self._drop(operand)
        return True

    def _writes_over(self, node: fx.Node, rest: list[fx.Node]) -> bool:
        """Whether the result takes the place of an operand."""
        return any(self._dies(operand, node, rest) for operand in candidates(node))

    def _dies(self, operand: fx.Node, node: fx.Node, rest: list[fx.Node]) -> bool:
        """Whether nobody needs the storage of an operand after a call."""
        (ref,) = self.storages.refs[operand]
        if ref in self.shared or not is_new(ref[0]) or self.holders.get(ref) != {operand} or operand in self.shelved:
            return False
        if (node, 0) in self.shared and operand.meta["val"]._is_view():
            return False
        after = self.step - 1 if rest else self.step
        needed = any(operand in each.all_input_nodes for each in rest)
        return not needed and operand not in self.stored and self._next_use(operand, after) is None

    def _next_use(self, node: fx.Node, after: int | None = None) -> int | None:
        uses = self.uses[node]
        place = bisect_right(uses, self.step if after is None else after)
        return uses[place] if place < len(uses) else None

    def _drop(self, node: fx.Node) -> None:
        self.alive.discard(node)
        for ref in self.storages.refs[node]:
            holders = self.holders.get(ref)
            if holders is not None and node in holders:
                holders.discard(node)
                if not holders:
                    self.now -= self.storages.num_bytes[ref]

    def _victim(self, pinned: set[fx.Node]) -> Ref | None:
        best, least = None, 0.0
        for ref, holders in self.holders.items():
            size = self.storages.num_bytes[ref]
            if not holders or size == 0 or holders & pinned or holders & self.stored:
                continue
            nexts = [use for holder in holders if (use := self._next_use(holder, self.step - 1)) is not None]
            distance = min(nexts, default=len(self.calls)) - self.step + 1
            price = self._cheapest(ref)
            if price is None:
                continue
            score = price / (size * distance)
            if best is None or score < least:
                best, least = ref, score
        return best

    def _price(self, ref: Ref, holders: set[fx.Node]) -> float | None:
        """What it costs to have a value again: its own call and those of operands that are gone, too.

        None if it cannot be had again, because a call on the way adds to a sum, or if that is a long way back: one
        value of a backward pass would bring a forward pass with it.
        """
        price, seen = 0.0, set[fx.Node]()
        pending = [ref[0], *holders]
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                price += seconds(node)
                pending += [o for o in node.all_input_nodes if o in self.uses and o not in self.alive]
                if len(seen) > _FAR or has_effects(node):
                    return None
        return price

    def _on_shelf(self, ref: Ref) -> fx.Node | None:
        """The value that could be shelved for a storage: one that fills it."""
        if not self.offload:
            return None
        full = [n for n in self.holders[ref] if isinstance(v := n.meta["val"], torch.Tensor) and _fills(v)]
        return next(iter(sorted(full, key=lambda node: node.name)), None)

    def _cheapest(self, ref: Ref) -> float | None:
        """What it costs to let go of a storage and have it again; None if it cannot be."""
        again = self._price(ref, self.holders[ref]) if self.again else None
        shelved = None if self._on_shelf(ref) is None else self._shelf_price(ref)
        return min((price for price in (again, shelved) if price is not None), default=None)

    def _shelf_price(self, ref: Ref) -> float:
        return 2 * self.storages.num_bytes[ref] / _SHELF_BYTES + 10 * CALL

    def _evict(self, ref: Ref) -> None:
        held = self._on_shelf(ref)
        if held is not None and self._cheapest(ref) == self._shelf_price(ref) and held not in self.shelved:
            self.order.append(("shelve", held))
            self.shelved.add(held)
        for node in list(self.holders[ref]):
            following = self._next_use(node, self.step - 1)
            self._drop(node)
            if following is not None and node not in self.shelved:
                self._need_operands(node, following)

    def _need_operands(self, node: fx.Node, step: int) -> None:
        """The operands of what was let go are needed when it is computed again."""
        pending = [node]
        while pending:
            for operand in self._inputs([pending.pop()]):
                if step not in self.uses[operand]:
                    insort(self.uses[operand], step)
                    if operand not in self.alive and operand not in self.shelved:
                        pending.append(operand)


def _fills(value: torch.Tensor) -> bool:
    return not value._is_view() and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def scheduled(body: Body, order: Iterable[Step]) -> Body:
    """The body with its calls in another order; a call that stands in it again is a copy."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    handles: dict[fx.Node, fx.Node] = {}
    for node in (n for n in body.graph.nodes if n.op == "placeholder"):
        copies[node] = graph.node_copy(node)
    for what, node in order:
        if what == "shelve":
            handles[node] = graph.call_function(shelve, (copies[node],))
            handles[node].meta["val"] = None
        elif what == "unshelve":
            copies[node] = graph.call_function(unshelve, (handles[node],))
            copies[node].meta.update(val=node.meta["val"], alias=(None,))
        else:
            again = node in copies
            copies[node] = graph.node_copy(node, lambda operand: copies[operand])
            if again:
                copies[node].meta["again"] = True
    return body.with_graph(graph)


def recompute(body: Body, limit: int, offload: bool = False, again: bool = True) -> Body | None:
    """The body within `limit` bytes, with values computed again or offloaded; None if that does not suffice."""
    if _least_bytes(body) > limit:
        return None
    order = _Play(body, limit, offload, again).run()
    if order is None:
        return None
    runs = Counter(node for what, node in order if what == "run" and has_effects(node))
    assert all(count == 1 for count in runs.values()), "a sum would be added to twice"
    return scheduled(body, order)


def _least_bytes(body: Body) -> int:
    """What the most demanding call needs by itself: operands, results, workspace, and what is stored by then."""
    found = body.notes.get("least")
    if found is None:
        storages, found, stored = storages_of(body), 0, set[Ref]()
        for node in body.calls:
            refs = {ref for each in (node, *node.all_input_nodes) for ref in storages.refs[each]} | stored
            written = {ref for ref in storages.made_by(node) if candidates(node)}
            found = max(found, inside(node) + sum(storages.num_bytes.get(ref, 0) for ref in refs - written))
            if node.target is sink_value and body.chunk is None:
                stored.update(storages.refs[node.args[2]])  # type: ignore[index]
        body.notes["least"] = found
    return int(found)
