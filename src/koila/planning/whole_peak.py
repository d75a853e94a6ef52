"""What an unsplit run will allocate, known before anything runs.

*Takes* a recorded program. *Gives* a `Projection`. The projection is the run itself, on fake tensors under the storage
tracker, with PyTorch's own autograd; for a program that is known at other sizes it is told by formulas
(`koila.planning.stories`). Nobody's code sees a fake tensor: hooks on values are left out and their bytes
added. A program that cannot run on fake tensors is bounded by what was recorded, and says so. (A run in chunks is
projected from its plan: `koila.planning.peak`.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

import torch

from koila import events
from koila._bytes import format_bytes
from koila._torch import FakeTensorMode, in_turn, without_saved_tensors_hooks
from koila.ir.cache import Cache
from koila.ir.formulas import NoFormula
from koila.ir.graph import Graph
from koila.ir.job import Job
from koila.ir.node import HOOKS, Node, Value
from koila.ir.numbers import num_input_numbers, numbers_of, structure_of
from koila.ir.replay import Lookup, replay
from koila.ir.stand_ins import StandIns
from koila.planning.devices import current_rules, planning_for
from koila.planning.peak import Projection
from koila.planning.stories import Stories, Story
from koila.planning.tracker import FakeTracker
from koila.planning.whole_layers import WholeLayers

VALUES_PER_CALL = 8
"""So many values stand for a recorded call, its gradient, and what autograd keeps for them."""


def drawn_bytes(graph: Graph) -> int:
    """Bytes of the random numbers that the program holds."""
    return sum(source.num_bytes for node in graph.nodes for source in node.draws)


def leaf_bytes(leaves: Iterable[torch.Tensor]) -> int:
    """Bytes of dense tensors like these leaves: their gradients."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


_projections: Cache[Projection] = Cache("projection_cache", 16)


def whole_peak(job: Job) -> Projection:
    """The peak of an unsplit run of a job."""
    graph, roots = job.whole_graph, _roots(job)
    places = tuple(graph.outputs.index(root) for root in roots)
    with planning_for(str(job.device), job.num_threads):
        key = (current_rules(), graph.key, places)
        found = _projections.get_or_add(key, lambda: _project(graph, roots, (current_rules(), places)))
    held, backward = job.history
    gradients = leaf_bytes(leaf for leaf in graph.leaves if leaf.requires_grad) if roots else 0
    peak = held + max(found.peak_bytes, gradients + backward if roots and backward else 0) + job.copied_bytes
    kinds = [("activations and gradients", found.peak_bytes), ("what is copied to be restored", job.copied_bytes)]
    kinds.append(("eager code before the program", peak - found.peak_bytes - job.copied_bytes))
    return replace(found, peak_bytes=peak, kinds=tuple((kind, size) for kind, size in kinds if size))


def whole_story(job: Job) -> Story | None:
    """What an unsplit run of a job allocates and frees, event by event; None if it cannot be told."""
    graph, roots = job.whole_graph, _roots(job)
    try:
        return _story(graph, roots, tuple(graph.outputs.index(root) for root in roots))
    except Exception:  # `whole_peak` says why, and bounds it.
        return None


def _roots(job: Job) -> list[Value]:
    """What an unsplit run is differentiated from, now or later: its values carry PyTorch's own graph."""
    return [job.graph.outputs[root] for root in job.demand.roots]


def _project(graph: Graph, roots: Sequence[Value], key: Hashable) -> Projection:
    try:
        story = _story(graph, roots, key)
    except Exception as error:  # What fake tensors cannot do is bounded instead (Rule 6: it is said).
        events.count(f"projection::bounded::{type(error).__name__}", site=graph.nodes[-1].site)
        return _bound(graph, roots, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    found, position = story.peak
    peak = found + drawn_bytes(graph) + _beside_bytes(graph) + _slack_bytes(story) + _hooked_bytes(graph)
    text, largest = story.operators[position] if story.operators else "", story.largest_at(position)
    if largest is None:
        return Projection(peak, text, story=weakref.ref(story))
    birth = largest.birth
    text += f"; the largest value there is {birth.operator} {list(birth.shape)} ({format_bytes(birth.num_bytes)})"
    return Projection(peak, text, recorded=cast("int | None", largest.place), story=weakref.ref(story))


_stories: Cache[Stories] = Cache("story_cache", 200_000, lambda stories: stories.weight)
"""By structure, what programs allocate at some sizes, and from that at any; bounded by events."""


def _story(graph: Graph, roots: Sequence[Value], key: Hashable) -> Story:
    """What an unsplit run allocates and frees: from formulas, where the structure is known at other sizes."""
    structure, numbers = (structure_of(graph), key), numbers_of(graph)
    stories = _stories.get(structure) or Stories(num_input_numbers(graph))
    try:
        found = stories.tell(numbers)
        events.count("sizes::projected")
        return found
    except NoFormula:
        tracker = _replayed(graph, roots)
    found = Story(tracker.trail, tracker.operators, tracker.lives, tracker.calls)
    stories.add(numbers, found)
    _stories.add(structure, stories)
    return found


def _bound(graph: Graph, roots: Sequence[Value], reason: str) -> Projection:
    """Everything that the calls make, and as much again for a backward pass: more than a run needs, but no proof."""
    made = sum(output.prepass.num_bytes for node in graph.nodes for output in node.inference.outputs)
    gradients = leaf_bytes(leaf for leaf in graph.leaves if leaf.requires_grad) if roots else 0
    peak = made * (3 if roots else 1) + gradients + drawn_bytes(graph) + _beside_bytes(graph)
    return Projection(peak, f"all that it makes: it cannot be projected ({reason})")


def _beside_bytes(graph: Graph) -> int:
    """What tensors take beside their elements, and libraries for themselves."""
    rules = current_rules()
    return VALUES_PER_CALL * rules.value_bytes * len(graph.nodes) + rules.library_bytes


def _slack_bytes(story: Story) -> int:
    """By how much the blocks of all storages that are alive at one time may be larger, at the most."""
    rules = current_rules()
    if not rules.unsplit_bytes:
        return 0
    changes: Counter[int] = Counter()
    for life in story.lives:
        slack = rules.slack_bytes(life.birth.num_bytes)
        changes[life.born] += slack
        if life.died is not None:
            changes[life.died] -= slack
    return max(accumulate(change for _, change in sorted(changes.items())), default=0)


def _hooked_bytes(graph: Graph) -> int:
    """Gradients of values with hooks stay until the hook has seen them."""
    hooked = (node.operands[0] for node in graph.nodes if node.func in HOOKS)
    return sum(value.prepass.num_bytes for value in hooked if isinstance(value, Value))


@in_turn
def _replayed(graph: Graph, roots: Sequence[Value]) -> FakeTracker:
    """Replay the program on fake tensors with autograd, and differentiate its roots."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = StandIns(graph)
    environment = fakes.environment
    alive = set(graph.outputs)
    last = {value: node for node in fakes.calls for value in node.values()}
    ending: dict[Node, list[Value]] = {}
    for value, node in last.items():
        ending.setdefault(node, []).append(value)

    def free(node: Node) -> None:
        for value in ending.get(node, ()):
            if value not in alive:
                environment.pop(value, None)

    with mode, without_saved_tensors_hooks(), FakeTracker() as tracker:
        places = graph.positions

        def lookup_for(node: Node) -> Lookup:
            tracker.place = places[node]
            return fakes.lookup

        with WholeLayers():
            replay(fakes.calls, environment, lookup_for, fakes.numbers, free)
        tracker.place = None  # A backward pass.
        with torch.autograd.set_detect_anomaly(False):  # It would look for NaN in fake gradients.
            for root in roots:
                environment[root].backward(torch.ones_like(environment[root]), retain_graph=root is not roots[-1])
    return tracker
