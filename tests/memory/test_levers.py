"""The six levers: for each a program in which it alone makes a budget fit that no plan without levers can meet."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila
from koila.analysis.program import Program, program_of
from koila.analysis.split import Facts
from koila.execution.offload import offload_in
from koila.execution.results import inputs_of
from koila.execution.seeds import seed_for
from koila.execution.split_run import CompiledPlan, run_chunked
from koila.ir.graph import Graph
from koila.ir.job import Demand, Wanted
from koila.planning.peak import project
from koila.planning.phases import make_layout
from koila.planning.plan import Plan, make_plan
from koila.planning.schedule import Schedule
from koila.planning.search import Search, fit
from koila.planning.step import Kind
from koila.planning.tracker import StorageTracker


def noise(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# Programs.


def wide_mlp() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1)).double()
    return model(koila.lazy(noise(32, 16))).square().mean()


def normalised_model(depth: int = 3) -> nn.Module:
    layers = [(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(layer for group in layers for layer in group)).double()


def normalised(depth: int = 3) -> torch.Tensor:
    return normalised_model(depth)(koila.lazy(noise(256, 32))).pow(4).sum()


def head_and_loss() -> torch.Tensor:
    hidden, targets = koila.lazy(noise(1, 64, 16, requires_grad=True), torch.arange(64).view(1, 64) % 512)
    logits = nn.Linear(16, 512).double()(hidden)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mlp_over_tokens() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 8)).double()
    return model(koila.lazy(noise(1, 256, 8, requires_grad=True))).square().mean()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def attention(heads: int, length: int) -> torch.Tensor:
    q, k, v = koila.lazy(*(noise(1, heads, length, 4, requires_grad=True) for _ in range(3)))
    return attend(q, k, v).square().sum()


def projected_attention(batch: int) -> torch.Tensor:
    """Queries, keys and values from one linear layer."""
    mixed = nn.Linear(16, 48).double()(koila.lazy(noise(batch, 64, 16)))
    q, k, v = (part.view(batch, 64, 4, 4).transpose(1, 2) for part in mixed.split(16, dim=2))
    return attend(q, k, v).square().sum()


def deep_mlp() -> torch.Tensor:
    layers = [(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*(layer for group in layers for layer in group)).double()
    return model(koila.lazy(noise(1, 64, 8))).square().sum()


def branches() -> torch.Tensor:
    """All branches are made before the first is reduced."""
    x = koila.lazy(noise(1, 256))
    made = [torch.sin(x * number) for number in range(1, 9)]
    return torch.stack([branch.sum() for branch in made]).sum()


# Plans.


@dataclass(frozen=True)
class Traced:
    """A program that is ready for the search."""

    graph: Graph
    program: Program
    facts: Facts

    def search(self, *levers: str) -> Search:
        return Search(self.facts, frozenset(levers))

    def run(self, plan: Plan) -> tuple[list[torch.Tensor | None], int]:
        """Results and the measured peak."""
        roots = [self.graph.outputs[root] for root in self.program.demand.roots]
        seeds = [seed_for(root.prepass, None) for root in roots]
        inputs = inputs_of(self.program.joint, self.graph, seeds)
        compiled = CompiledPlan(plan)
        with StorageTracker() as tracker:
            results = run_chunked(compiled, self.graph, inputs)
        return results, tracker.peak_bytes


def traced(value: torch.Tensor) -> Traced:
    """A value and its gradients, if it has any."""
    graph = koila.graph(value)
    wrt = tuple(index for index, leaf in enumerate(graph.leaves) if leaf.requires_grad)
    program = program_of(graph, Demand((0,), wrt) if wrt else Demand())
    return Traced(graph, program, program.facts(Wanted((0,), gradients=bool(wrt))))


def fit_alone(lever: str, value: torch.Tensor, share: float) -> Plan:
    """The plan of one lever inside a share of the plain plan's bytes, which no plan without levers can meet."""
    found = traced(value)
    plain, projection = found.search().smallest()
    allowed = int(share * projection.peak_bytes)
    with pytest.raises(koila.BudgetError, match="at the smallest") as refused:
        found.search().run(allowed)
    assert refused.value.needed_bytes == projection.peak_bytes

    plan, projection = found.search(lever).run(allowed)
    results, measured = found.run(plan)
    assert measured <= projection.peak_bytes <= allowed
    for mine, theirs in zip(results, found.run(plain)[0], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine - theirs).norm() <= 1e-10 * theirs.norm()
    return plan


def test_chunk() -> None:
    plan = fit_alone("chunk", wide_mlp(), 0.4)
    assert 1 < plan.chunk_size < 32


def test_chunk_does_not_lose_a_whole_batch_that_needs_fewer_bytes() -> None:
    """With one chunk there are no sums beside what a chunk computes."""
    x, targets = koila.lazy(noise(16, 16), torch.arange(16) % 4)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    found = traced(F.cross_entropy(model(x), targets))
    allowed = found.search().smallest()[1].peak_bytes
    assert found.search("chunk").run(allowed)[1].peak_bytes <= allowed


def test_keep() -> None:
    plan = fit_alone("keep", normalised(depth=12), 0.6)
    assert plan.chunk_size == 256 and plan.recomputed["aten.mm.default"]


def test_what_is_not_cut_computes_a_normalisation_again_as_one_line_per_channel() -> None:
    """Its moments are found once, in two passes as those of a chunk, and kept."""
    found = traced(normalised(depth=6))
    uncut = replace(found, facts=found.program.uncut_facts(Wanted((0,), gradients=True)))
    plain = make_plan(make_layout(uncut.facts), uncut.facts.num_samples)
    allowed = project(plain).peak_bytes * 7 // 10
    fitted = fit(plain, allowed)
    assert fitted is not None
    labels = Counter(label for schedule in fitted[0].schedules for label in labels_of(schedule))
    assert labels["chunk_moments"] == 6 and not any("var_mean" in label for label in labels)
    assert sum(fitted[0].recomputed.values()) and "chunk_moments" not in fitted[0].recomputed
    results, measured = uncut.run(fitted[0])
    assert measured <= fitted[1].peak_bytes <= allowed
    for mine, theirs in zip(results, found.run(found.search().smallest()[0])[0], strict=True):
        if mine is not None and theirs is not None:
            assert (mine - theirs).norm() <= 1e-10 * theirs.norm()


def labels_of(schedule: Schedule) -> list[str]:
    """What the steps of a schedule call."""
    return [step.work.label for step in schedule.steps if step.kind is Kind.RUN]


def test_region_over_the_tokens_of_a_head_and_its_loss() -> None:
    plan = fit_alone("region", head_and_loss(), 0.35)
    assert any("of 64" in region for region in plan.regions)


def test_region_over_the_tokens_of_an_mlp() -> None:
    plan = fit_alone("region", mlp_over_tokens(), 0.25)
    assert any("of 256" in region for region in plan.regions)


def test_region_over_the_queries_of_an_attention() -> None:
    plan = fit_alone("region", attention(heads=1, length=96), 0.4)
    assert any("of 96" in region for region in plan.regions)


def test_region_over_the_heads_of_an_attention() -> None:
    plan = fit_alone("region", attention(heads=4, length=64), 0.5)
    assert any("of 4" in region for region in plan.regions)


def test_region_in_an_attention_with_its_projection() -> None:
    assert fit_alone("region", projected_attention(2), 0.7).regions


def test_region_in_an_attention_with_its_projection_at_batch_one() -> None:
    assert fit_alone("region", projected_attention(1), 0.7).regions


def test_recompute() -> None:
    assert fit_alone("recompute", deep_mlp(), 0.5).recomputed


def test_order() -> None:
    plan = fit_alone("order", branches(), 0.5)
    assert not plan.recomputed and not plan.regions


def test_offload_inside_a_schedule(tmp_path: Path) -> None:
    with offload_in(str(tmp_path)):
        plan = fit_alone("offload", deep_mlp(), 0.6)
    assert any(step.kind is Kind.OFFLOAD for step in plan.after.steps)
    assert not plan.recomputed and list(tmp_path.iterdir()) == []


def test_offload_of_what_is_kept_between_phases(tmp_path: Path) -> None:
    with offload_in(str(tmp_path)):
        plan = fit_alone("offload", normalised(), 0.55)
    assert plan.offloaded and list(tmp_path.iterdir()) == []


# Through the public functions.


def step(model: nn.Module, x: torch.Tensor, allowed: int | str, offload: str | None) -> koila.Report:
    model.zero_grad()
    loss = model(koila.lazy(x)).pow(4).sum()
    with koila.measure(), koila.budget(allowed, offload=offload):
        loss.backward()
    return koila.last_report()


def test_a_scope_with_offload(tmp_path: Path) -> None:
    """Between the phases lie 320 KiB."""
    model, x = normalised_model(), noise(256, 32)
    model(x).pow(4).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    report = step(model, x, "100KiB", str(tmp_path))
    assert report.offloaded and report.measured_bytes <= report.projected_bytes <= 100 * 1024
    for parameter, theirs in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad - theirs).norm() <= 1e-10 * theirs.norm()
    without = step(model, x, "100KiB", None)
    assert not without.offloaded and sum(without.recomputed.values()) > sum(report.recomputed.values())


def test_batch_normalisation_is_shrunk_with_eagers_kernels() -> None:
    """Cutting it costs a phase for every layer; letting its outputs go does not, and gives eager's bits."""
    model, twin, x = normalised_model(), normalised_model(), noise(256, 32)
    twin.load_state_dict(model.state_dict())
    with StorageTracker() as tracker:
        twin(x).pow(4).sum().backward()
    allowed = int(0.7 * tracker.peak_bytes)
    report = step(model, x, allowed, None)
    assert report.phase_seconds == () and report.recomputed
    assert report.measured_bytes <= report.projected_bytes <= allowed
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for mine, its in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("chunk_size", [1, 2, 7])
def test_two_gradients_of_one_weight_are_added_to_it_one_by_one(chunk_size: int) -> None:
    """The weight of a tied head; with their sum made first, three values of its size would be alive at once."""
    torch.manual_seed(0)
    table, tokens = nn.Embedding(512, 32).double(), torch.randint(0, 512, (7, 5))

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(table(tokens), table.weight).square().sum()

    loss(tokens).backward()
    expected, table.weight.grad = table.weight.grad, None
    gc.collect()  # Values that another test recorded and forgot would be computed, too.
    recorded = loss(koila.lazy(tokens))
    with StorageTracker() as tracker, koila.budget(chunk_size=chunk_size):
        recorded.backward()
    assert (table.weight.grad - expected).norm() <= 1e-10 * expected.norm()
    weight, logits = 512 * 32 * 8, 5 * 512 * 8 * chunk_size
    assert tracker.peak_bytes < 2 * weight + 3 * logits + 16384


def test_running_statistics_are_part_of_the_budget() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(2048), nn.Tanh(), nn.BatchNorm1d(2048)).double(), noise(8, 2048, 2)
    with pytest.raises(koila.BudgetError, match="at the smallest") as refused:
        step(model, x, 1000, None)
    report = step(model, x, refused.value.needed_bytes, None)
    assert report.measured_bytes <= report.projected_bytes


def test_the_head_of_a_language_model_inside_a_budget_of_its_inputs() -> None:
    hidden, targets = noise(1, 64, 16, requires_grad=True), torch.arange(64).view(1, 64) % 512
    head = nn.Linear(16, 512).double()

    def loss(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())

    expected = torch.autograd.grad(loss(hidden, targets), (hidden, *head.parameters()))
    with koila.measure():
        loss(*koila.lazy(hidden, targets, budget="200KiB")).backward()
    report = koila.last_report()
    assert report.regions and report.measured_bytes <= report.projected_bytes <= 200 * 1024
    for tensor, theirs in zip((hidden, *head.parameters()), expected, strict=True):
        assert (tensor.grad - theirs).norm() <= 1e-10 * theirs.norm()
