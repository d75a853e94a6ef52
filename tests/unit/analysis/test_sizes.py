"""Joint graphs of new sizes: built from formulas they are the graphs that a trace gives, node by node, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import koila
from koila.analysis.family import Family, Sample, apply_symbolic_shapes
from koila.analysis.marks import SlotArgument
from koila.analysis.trace import Joint, trace
from koila.ir.formulas import Formula, Formulas, NoFormula
from koila.ir.graph import Graph
from koila.ir.job import Demand
from koila.ir.numbers import structure_of

Program = Callable[[torch.Tensor], torch.Tensor]
NEW = ((3, 23), (5, 40), (6, 6), (16, 16))

torch.manual_seed(0)
LINEAR, WORDS, TABLE = nn.Linear(16, 16), nn.Embedding(300, 16), nn.Parameter(torch.randn(64, 64))
CONV, GROUPS, POOL = nn.Conv1d(16, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.AdaptiveAvgPool1d(4)
ATTENTION = nn.MultiheadAttention(16, 2, batch_first=True)
LAYER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def _windows(h: torch.Tensor) -> torch.Tensor:
    batch, length, width = h.shape
    return h[:, : length // 4 * 4].reshape(batch, -1, 4, width).mean(2)


def _assigned(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, h.shape[1] // 2 :] = 0
    h[:, 0] += 1
    return h


PROGRAMS: dict[str, Program] = {
    "windows of four": _windows,
    "at most 24": lambda h: h[:, : min(h.shape[1], 24)],
    "the last ten": lambda h: h[:, -10:],
    "every second": lambda h: h[:, ::2],
    "padded to eight": lambda h: F.pad(h, (0, 0, 0, -h.shape[1] % 8)),
    "rolled by a third": lambda h: torch.roll(h, h.shape[1] // 3, 1),
    "three chunks": lambda h: sum(part.sum(1) for part in h.chunk(3, 1)).unsqueeze(1),  # type: ignore[union-attr]
    "standard deviations": lambda h: (h - h.mean(1, keepdim=True)) / (h.std(1, keepdim=True) + h.var((0, 1)) + 1),
    "scaled by the length": lambda h: F.scaled_dot_product_attention(h, h, h, scale=h.shape[1] ** -0.5),
    "a slot": lambda h: h * h.shape[1] ** -0.5,
    "a power": lambda h: h.abs().add(1).pow(1 / h.shape[1]),
    "interpolated": lambda h: F.interpolate(h.mT, size=h.shape[1] // 2, mode="nearest").mT,
    "pooled": lambda h: POOL(h.mT).mT,
    "strided": lambda h: CONV(h.mT).mT,
    "groups": lambda h: GROUPS(h.mT).mT,
    "distances": lambda h: torch.cdist(h, h),
    "einsum": lambda h: torch.einsum("btd,bsd->bts", h, h) @ h,
    "attention": lambda h: ATTENTION(h, h, h, need_weights=False)[0],
    "a layer": lambda h: LAYER(h),
    "unfolded": lambda h: h.unfold(1, 5, 3).mean(-1),
    "sorted": lambda h: h.cumsum(1).flip(1).sort(1)[0],
    "a bias": lambda h: (h @ h.mT + TABLE[: h.shape[1], : h.shape[1]]).softmax(-1) @ h,
    "positions": lambda h: h + WORDS(torch.arange(h.shape[1])),
    "the largest half": lambda h: h.topk(h.shape[1] // 2, 1)[0],
    "a causal mask": lambda h: (h @ h.mT).masked_fill(torch.ones(h.shape[1], h.shape[1]).triu(1).bool(), -1e9) @ h,
    "assigned": _assigned,
    "the diagonal": lambda h: (h @ h.mT).diagonal(dim1=1, dim2=2).unsqueeze(-1) * h,
    "repeated": lambda h: h.repeat(1, 2, 1).repeat_interleave(2, 1),
    "a value of one by the length": lambda h: torch.addcmul(h, h, h, value=1 / h.shape[1]),
}
BUILT = {name for name in PROGRAMS if name not in ("padded to eight", "distances")}
"""Programs of which at least one new size must be built from two samples."""


def recorded(program: Program, batch: int, length: int) -> tuple[Graph, Demand, torch.Tensor]:
    """The graph of a program with its backward pass; the loss is to be kept alive."""
    words = koila.lazy(torch.arange(batch * length).view(batch, length) % 300)
    loss = program(LINEAR(WORDS(words))).square().mean()
    graph = koila.graph(loss)
    wrt = tuple(number for number, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    return graph, Demand((0,), wrt), loss


def nodes_of(joint: Joint) -> list[Any]:
    """What two joint graphs must have in common to be the same."""
    index = {node: number for number, node in enumerate(joint.module.graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", index[value]
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return value.slot if isinstance(value, SlotArgument) else (type(value), value)

    def layout(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), value.dtype
        return [layout(item) for item in value] if isinstance(value, (list, tuple)) else value

    return [
        (node.op, "" if node.op == "placeholder" else str(node.target), plain(node.args), plain(dict(node.kwargs)),
         layout(node.meta.get("val")), node.meta.get("recorded"))
        for node in joint.module.graph.nodes
    ]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_that_is_built_is_the_graph_that_is_traced(name: str) -> None:
    program, samples, structures = PROGRAMS[name], [], []
    for batch, length in ((5, 19), (7, 22), (6, 14)):
        graph, demand, _ = recorded(program, batch, length)
        samples.append(Sample(graph, trace(graph, demand)))
        structures.append(structure_of(graph))
    assert len(set(structures)) == 1
    try:
        family = Family(samples)
    except NoFormula:
        assert name not in BUILT
        return
    num_built = 0
    for batch, length in NEW:
        graph, demand, _ = recorded(program, batch, length)
        try:
            joint = family.build(graph, demand)
        except NoFormula:
            continue
        assert nodes_of(joint) == nodes_of(trace(graph, demand)), (batch, length)
        num_built += 1
    assert num_built or name not in BUILT


def test_what_has_no_formula_has_none() -> None:
    found = Formulas([(8, 20), (8, 27)], 2)
    assert found.formula((10, 14)) is None  # Rounded up halves.
    assert found.formula((24, 32)) is None  # Padded to eight.
    for numbers in ((8, 1), (7, 31)):
        with pytest.raises(NoFormula):
            found.values_for(numbers)


def test_a_number_that_does_not_follow_its_formula_is_seen() -> None:
    found = Formulas([(8, 20, 10), (8, 27, 10)], 2)  # The last ten of a sequence.
    assert found.values_for((8, 31, 10)) == (31,)
    with pytest.raises(NoFormula):
        found.values_for((8, 6, 6))


def test_symbolic_shapes_follow_what_varies_and_not_what_is_as_long() -> None:
    found = Formulas([(4, 4), (5, 4)], 2)
    number = lambda sizes: sizes[0] if sizes[0] == sizes[1] else found.formula(tuple(sizes))  # noqa: E731
    layout = apply_symbolic_shapes([torch.empty(4, 4, 16), torch.empty(5, 4, 16)], number)
    assert layout.shape == [Formula((0,)), 4, 16] and layout.stride == [64, 16, 1]
