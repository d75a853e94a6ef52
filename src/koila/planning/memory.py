"""Bytes: which storages are alive at every step of a plan.

*Takes* bodies and plans. *Gives* their peaks, and what stands there. A storage dies with the last value in it, or when
a result is written over it; a merge that has begun is there while its loop goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from koila._bytes import format_bytes
from koila.analysis.monoids import HALVES, Sum
from koila.analysis.split import Item
from koila.analysis.types import Merged, Sliced
from koila.planning.body import SINKS, Body, sink_value
from koila.planning.plan import Plan, key_of
from koila.planning.storages import Ref, inside, last_steps, num_bytes, reused, storages_of, tensors_of


@dataclass(frozen=True, slots=True)
class Peak:
    """The worst moment of a body."""

    num_bytes: int
    """Alive at that moment, of what the body made."""
    step: int
    """The number of the call."""
    alive: tuple[Ref, ...]
    """What is alive."""


class _Lives:
    """From which to which call each storage of a body lives."""

    def __init__(self, body: Body, first: bool) -> None:
        self.storages, self.calls, self.reused = storages_of(body), body.calls, reused(body)
        last = dict(last_steps(body))
        self.extra: dict[int, int] = {}
        """Bytes that appear at a call and stay: merges that begin."""
        if first:
            self._hand_on(body, last)
        self.ends: dict[int, list[Ref]] = {}
        for ref, step in last.items():
            if ref in self.storages.num_bytes:
                self.ends.setdefault(step, []).append(ref)

    def _hand_on(self, body: Body, last: dict[Ref, int]) -> None:
        """What is handed on stays alive; what is added to a sum that has begun does not."""
        begun: set[Any] = set()
        for step, node in enumerate(self.calls):
            if "fused" in node.meta:
                index = node.meta["fused"].index
                self.extra[step] = 0 if index in begun else num_bytes(node, 0)
                begun.add(index)
            elif "skipped" in node.meta:
                continue
            elif node.target is sink_value and not isinstance(_kind(sink_of(body, node)), Sliced):
                value: Any = node.args[2]
                if node.args[1] in begun:
                    continue
                begun.add(node.args[1])
                if body.chunk is None or _may_own(value.meta["val"]):
                    last.update((ref, len(self.calls)) for ref in self.storages.refs[value])
                else:
                    self.extra[step] = state_bytes(sink_of(body, node))
            else:
                self.extra[step] = getattr(node.target, "sum_bytes", 0)

    def walk(self) -> Iterator[tuple[int, dict[Ref, None]]]:
        """For each call, the bytes alive while it runs, and what they are."""
        alive: dict[Ref, None] = {}
        now = 0
        for step, node in enumerate(self.calls):
            if node in self.reused:
                (ref,) = self.storages.refs[self.reused[node]]
                del alive[ref]
                now -= self.storages.num_bytes[ref]
            for ref in self.storages.made_by(node):
                alive[ref] = None
                now += self.storages.num_bytes[ref]
            now += self.extra.get(step, 0)
            yield now + inside(node), alive
            for ref in self.ends.get(step, ()):
                if ref in alive:
                    del alive[ref]
                    now -= self.storages.num_bytes[ref]


def peak_of(body: Body, first: bool = False) -> Peak:
    """The worst moment of a body; with `first`, what it hands on stays alive: it starts the merges, or is stored."""
    found: Peak | None = body.notes.get(("peak", first))
    if found is None:
        found = Peak(0, 0, ())
        for step, (now, alive) in enumerate(_Lives(body, first).walk()):
            if now > found.num_bytes:
                found = Peak(now, step, tuple(alive))
        body.notes["peak", first] = found
    return found


def totals(body: Body) -> list[int]:
    """The bytes alive at each call of a body."""
    return [now for now, _ in _Lives(body, body.chunk is None).walk()]


def sink_of(body: Body, node: fx.Node) -> Item:
    """What a value is handed on as."""
    index: Any = node.args[1]
    return body.sinks[index]


def _kind(item: Item) -> Any:
    return item.type[0] if isinstance(item.type, tuple) else item.type


def _may_own(value: Any) -> bool:
    """Whether a merge can start with a value itself, without a copy."""
    if not isinstance(value, torch.Tensor) or value.dtype in HALVES or value._is_view():
        return False
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def value_bytes(item: Item) -> int:
    """The bytes of a whole value."""
    found = (t for t in tensors_of(item.node.meta.get("val")) if t is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def state_bytes(item: Item) -> int:
    """The bytes of a merge that has begun."""
    kind = _kind(item)
    if not isinstance(kind, Merged):
        return value_bytes(item)
    tensors = [t for t in tensors_of(item.node.meta.get("val")) if t is not None]
    wide = sum(t.numel() * (4 if t.dtype in HALVES else t.element_size()) for t in tensors)
    return wide if isinstance(kind.monoid, Sum) else 2 * wide


@dataclass(frozen=True, slots=True)
class Projection:
    """The bytes that a run allocates at its peak."""

    peak_bytes: int
    """Transients, merges, kept values, results and gradients."""
    largest: str
    """What stands at the peak."""
    section: int = 0
    """The section of the plan with the peak."""
    resident: tuple[int, ...] = ()
    """For each section, the bytes that are there beside what its body makes."""
    kinds: tuple[tuple[str, int], ...] = ()
    """What stands at the peak: (kind, bytes), together `peak_bytes`."""
    recorded: int | None = None
    """The recorded call that made the largest value at the peak; None in a backward pass."""


class _Residents:
    """Whole values that are alive between sections; views share their storage."""

    def __init__(self) -> None:
        self.tokens: dict[Item, frozenset[Any]] = {}
        self.sizes: dict[Any, int] = {}

    def add(self, item: Item, num_bytes: int) -> None:
        self.tokens[item] = frozenset([item])
        self.sizes[item] = num_bytes

    def add_from(self, body: Body) -> None:
        """What a section stores."""
        storages = storages_of(body)
        placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, body.wholes, strict=False)
        read = {node: self.tokens.get(key_of(item), frozenset()) for node, item in pairs}
        for node in body.calls:
            if node.target is sink_value:
                value: Any = node.args[2]
                tokens: set[Any] = set()
                for ref in storages.refs[value]:
                    if ref in storages.num_bytes:
                        self.sizes[ref] = storages.num_bytes[ref]
                        tokens.add(ref)
                    else:
                        tokens |= read.get(ref[0], frozenset())
                self.tokens[sink_of(body, node)] = frozenset(tokens)

    def free(self, items: Iterable[Item]) -> None:
        for item in items:
            self.tokens.pop(item, None)

    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.by_item())

    def by_item(self) -> Iterator[tuple[Item, int]]:
        """Each storage once, with the first item that holds it."""
        seen: set[Any] = set()
        for item, tokens in self.tokens.items():
            for token in tokens - seen:
                seen.add(token)
                yield item, self.sizes[token]


def project(plan: Plan) -> Projection:
    """The peak of a plan: at every step of every section."""
    here, resident = _Residents(), []
    best = Projection(0, "nothing")
    sizes = [stop - start for start, stop in plan.chunks]
    results = {key_of(item): "results" for item in plan.facts.results if item is not None}
    gradients = plan.facts.results[plan.facts.joint.num_outputs :]
    results |= {key_of(item): "gradients" for item in gradients if item is not None}

    def consider(body: Body, base: int, first: bool, section: int, merging: Sequence[Item] = ()) -> None:
        nonlocal best
        peak = peak_of(body, first)
        if base + peak.num_bytes <= best.peak_bytes:
            return
        kinds: Counter[str] = Counter()
        for item in merging:
            kinds[results.get(key_of(item), "merges")] += state_bytes(item)
        for item, size in here.by_item():
            kinds[results.get(item, "kept values")] += size
        hidden = inside(body.calls[peak.step])
        kinds["workspace"] += hidden
        kinds["activations"] += peak.num_bytes - hidden
        found = tuple((kind, size) for kind, size in sorted(kinds.items()) if size)
        text, recorded = describe(body, peak)
        best = Projection(base + peak.num_bytes, text, section, kinds=found, recorded=recorded)

    for number, phase in enumerate((*plan.phases, None)):
        body = plan.after if phase is None else phase.before
        # What the section reads for the last time is alive until then.
        resident.append(here.num_bytes())
        consider(body, resident[-1], True, 2 * number)
        here.add_from(body)
        here.free(plan.frees[2 * number])
        if phase is None:
            break
        for item in (*phase.targets, *phase.kept):
            if isinstance(_kind(item), Sliced):
                here.add(item, 0 if item in plan.offloaded else value_bytes(item))
        merged = [item for item in phase.targets if isinstance(_kind(item), Merged)]
        states = sum(map(state_bytes, merged))
        base = here.num_bytes()
        resident.append(base + states)
        for size, body in phase.loops.items():
            if size == sizes[0]:
                consider(body, base, True, 2 * number + 1)
            if size in sizes[1:]:  # The sums are there by then.
                consider(body, base + states, False, 2 * number + 1, merged)
        for item in merged:
            here.add(item, value_bytes(item))
        here.free(plan.frees[2 * number + 1])
    return replace(best, resident=tuple(resident))


def describe(body: Body, peak: Peak) -> tuple[str, int | None]:
    """What stands at a peak: the call, and the largest value alive with the recorded call that it comes from."""
    if not body.calls:
        return "nothing", None
    node = body.calls[peak.step]
    largest = max(peak.alive, key=lambda ref: num_bytes(*ref), default=None)
    text = str(node.args[2] if node.target in SINKS else node.target)
    if largest is None:
        return text, node.meta.get("recorded")
    tensor = tensors_of(largest[0].meta["val"])[largest[1]]
    assert tensor is not None
    size = format_bytes(tensor.numel() * tensor.element_size())
    text = f"{text}; the largest value there is {largest[0].target} {list(tensor.shape)} ({size})"
    return text, largest[0].meta.get("recorded")
