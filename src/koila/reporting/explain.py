"""`koila.explain`: how a program is cut, and why.

*Takes* a job and the decision about it. *Gives* an `Explanation` with the user's lines in it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx

from koila._budget import Budget
from koila._bytes import format_bytes
from koila.analysis.program import NotSplittable
from koila.analysis.split import Facts, Item
from koila.analysis.types import Merged, Sliced, SplitType
from koila.ir.graph import Graph
from koila.ir.job import Job
from koila.planning.decide import Decision, decide
from koila.planning.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """How a program would run in chunks."""

    num_samples: int
    """The batch size; 0 if the program runs whole."""
    num_phases: int
    counts: dict[str, int]
    """How many values of the joint graph are Sliced, Merged, Whole."""
    phases: tuple[str, ...]
    """For each phase, what had to be finished before it."""
    gathers: tuple[str, ...]
    """Each value that had to be gathered: its size, the operator that asked, the user's line."""
    kept: tuple[str, ...]
    """Each value that is kept whole between phases."""
    whole_because: str | None
    """Why the program cannot be cut, if it cannot."""
    how: str = "split"
    """How it runs: `whole` or `split`; a run that is not cut is explained as it would be cut."""
    reasons: tuple[str, ...] = ()
    """Why it runs as it does."""

    def __str__(self) -> str:
        if self.whole_because is not None:
            return f"runs whole: {self.whole_because}"
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        why = "; ".join(self.reasons)
        lines = [f"runs {'in chunks' if self.how == 'split' else 'whole'}{f': {why}' if why else ''}"]
        lines += [] if self.how == "split" else ["if it were cut:"]
        lines += [f"batch of {self.num_samples}, {self.num_phases} phases; values: {counts}"]
        lines += [f"  phase {number}: {reason}" for number, reason in enumerate(self.phases)]
        lines += [f"  gathered: {text}" for text in self.gathers] or ["  gathered: nothing"]
        return "\n".join(lines + [f"  kept: {text}" for text in self.kept])


def explanation(job: Job, decision: Decision) -> Explanation:
    """A decision as a person reads it; a run that is not cut is explained as it would be cut, where it can be."""
    if decision.plan is not None:
        return _explain(decision.plan, job.graph, decision)
    try:
        cut = decide(job.within(Budget(chunk_size=1)))
    except NotSplittable as reason:
        return Explanation(0, 0, {}, (), (), (), str(reason), decision.how, decision.reasons)
    if cut.plan is None:
        return Explanation(0, 0, {}, (), (), (), cut.fallback or cut.reasons[0], decision.how, decision.reasons)
    return _explain(cut.plan, job.graph, decision)


def _explain(plan: Plan, graph: Graph, decision: Decision) -> Explanation:
    facts = plan.facts
    nodes = {node.name: node for node in facts.joint.module.graph.nodes}
    gathers = tuple(
        f"{_describe(nodes[name], graph)}, because {_operator(nodes.get(user), user)} needs all of it"
        for name, user in facts.gathers
    )
    kept = tuple(_describe(item.node, graph) for phase in plan.phases for item in phase.kept)
    reasons = tuple(_reason(plan, number, graph) for number in range(len(plan.phases)))
    return Explanation(
        facts.num_samples, len(plan.phases), _counts(facts), reasons, gathers, kept, None, decision.how,
        decision.reasons,
    )  # fmt: skip


def _reason(plan: Plan, number: int, graph: Graph) -> str:
    if number == 0:
        return "what needs nothing else of the batch"
    ended = plan.phases[number - 1].targets
    return (
        "waits for " + "; ".join(_describe(item.node, graph) for item in ended[:3]) + (" …" if len(ended) > 3 else "")
    )


def _counts(facts: Facts) -> dict[str, int]:
    names = Counter(_name(item) for item in facts.items if item.kind not in ("finish", "gather", "slice"))
    return dict(sorted(names.items()))


def _name(item: Item) -> str:
    kind: SplitType = item.type[0] if isinstance(item.type, tuple) else item.type
    if isinstance(kind, Sliced):
        uniform = item.kind == "chunk" and not any(operand.per_chunk for operand in item.operands)
        return "Uniform" if uniform else "Sliced"
    return "Merged" if isinstance(kind, Merged) else "Whole"


def _operator(node: fx.Node | None, name: str) -> str:
    return str(node.target) if node is not None else name


def _describe(node: fx.Node, graph: Graph) -> str:
    value = node.meta.get("val")
    shape = ""
    if isinstance(value, torch.Tensor):
        shape = f" {list(value.shape)} ({format_bytes(value.numel() * value.element_size())})"
    recorded = node.meta.get("recorded")
    place = f" at {graph.nodes[recorded].site}" if recorded is not None else " in backward"
    return f"{node.target}{shape}{place}"
