"""Budgets, limits, plans and reports are those of the device that a program runs on."""

from __future__ import annotations

import gc
from functools import cache, partial
from typing import Any

import pytest
import torch

import koila
from koila.events import RunStart, subscribe
from koila.execution.jobs import LARGE_BYTES
from tests.accelerator import sim
from tests.accelerator.programs import program
from tests.accelerator.trial import Outcome, assert_kept, distance, forget, step


@cache
def eager(name: str) -> Outcome:
    return step(name)


def pending(name: str, **options: Any) -> torch.Tensor:
    made = program(name).to("sim")
    return made.loss(made.model, tuple(koila.lazy(each, **options) for each in made.inputs))


def test_a_share_is_one_of_the_devices_memory() -> None:
    sim.limit(sim.live() + 8_000_000)
    loss = pending("gpt")
    free = torch.accelerator.get_memory_info("sim:0")[0]
    with koila.budget(0.25):
        loss.backward()
    allowed = koila.last_report().allowed_bytes
    assert 0.8 * 0.25 * free < allowed <= 0.25 * free


def test_a_share_given_to_inputs_is_one_of_the_memory_they_are_in() -> None:
    given = torch.randn(64, 64, device="sim")
    sim.limit(sim.live() + 1_000_000)
    (koila.lazy(given, budget=0.5) * 2).sum().item()
    assert koila.last_report().allowed_bytes == 500_000


def test_a_total_counts_what_is_alive_on_the_device() -> None:
    loss = pending("gpt")
    total = sim.live() + eager("gpt").peak_bytes // 2
    with koila.budget(total=total):
        sim.reset_peak()
        loss.backward()
    assert sim.peak() <= total
    assert koila.last_report().how == "split"


def test_a_total_that_is_alive_already_is_refused_for_the_device() -> None:
    loss = pending("gpt")
    with koila.budget(total=sim.live() // 2), pytest.raises(koila.errors.BudgetError, match="alive on sim:0"):
        loss.backward()


def test_a_refusal_names_the_device() -> None:
    loss = pending("gpt", budget="1KiB")
    with pytest.raises(koila.errors.BudgetError, match=r"allowed 1024 \(1.0 KiB\) on sim:0"):
        loss.backward()


def test_without_a_budget_the_devices_free_memory_counts() -> None:
    given = torch.zeros(LARGE_BYTES // 8, device="sim")
    sim.limit(sim.live() + LARGE_BYTES)
    before = torch.accelerator.memory_stats("sim:0")["num_ooms"]
    value = koila.lazy(given)
    result = (value + 1).exp().sum() + (value + 2).exp().sum() + (value + 3).exp().sum()
    assert koila.plan(result).allowed_bytes < LARGE_BYTES
    result.item()
    assert torch.accelerator.memory_stats("sim:0")["num_ooms"] == before, "it was known before anything ran"


def test_measuring_asks_the_device() -> None:
    found = step("gpt", partial(koila.lazy, budget=eager("gpt").peak_bytes // 2), koila.measure)
    # What the forward pass made before the run, such as positions, is in the peak alone.
    assert 0.99 * found.peak_bytes < found.report.measured_bytes <= found.peak_bytes


def test_garbage_that_dies_in_a_step_does_not_hide_what_it_allocates() -> None:
    def measured(num_garbage: int) -> int:
        gc.collect()
        garbage: list[Any] = [torch.zeros(num_garbage, device="sim")]
        garbage.append(garbage)
        del garbage
        with koila.measure(), koila.budget(chunk_size=2):
            (koila.lazy(torch.zeros(8, 1000, device="sim")) + 1).sum().item()
        return koila.last_report().measured_bytes

    unsubscribe = subscribe(lambda event: gc.collect(), RunStart)
    gc.disable()
    try:
        assert measured(1_000_000) == measured(0) > 0
    finally:
        gc.enable()
        unsubscribe()


@pytest.mark.parametrize("share", [1.5, 0.8])
@pytest.mark.parametrize("name", ["gpt with dropout", "cnn", "mlp"])
def test_blocks_of_a_caching_allocator_are_inside_of_the_budget(name: str, share: float) -> None:
    allowed = int(share * eager(name).peak_bytes)
    with sim.caching() as device:
        forget()
        found = step(name, partial(koila.lazy, budget=allowed), device=device)
    assert_kept(found)
    assert distance(found, eager(name)) < 1e-10


def test_large_blocks_of_a_caching_allocator_are_inside_of_the_budget() -> None:
    """A rest of up to 1 MiB stays with a block of more than 1 MiB."""
    with sim.caching() as device:
        forget()
        given, weight = torch.randn(4096, 300, device=device), torch.randn(300, 300, device=device, requires_grad=True)
        holes = [torch.empty(size << 18, device=device) for size in (6, 7, 9, 13)]
        holes.clear()
        sim.reset_peak(2)
        before = sim.live(2)
        (koila.lazy(given, budget="20MiB") @ weight).relu().square().mean().backward()
        report = koila.last_report()
    assert sim.peak(2) - before <= report.projected_bytes <= report.allowed_bytes


# Plans for a device that is not here.


def test_a_plan_for_cuda_follows_the_rules_of_cuda() -> None:
    made = program("gpt")
    loss = made.loss(made.model, tuple(map(koila.lazy, made.inputs)))
    on_cpu = koila.plan(loss, backward=True, budget="1GiB")
    on_cuda = koila.plan(loss, backward=True, device="cuda", total="24GiB")
    assert on_cuda.device == "cuda"
    assert on_cuda.allowed_bytes == (24 << 30) - (512 << 20), "the driver has taken its part"
    assert on_cuda.projected_bytes >= on_cpu.projected_bytes + (31 << 20), "cuBLAS has a workspace"


def test_a_plan_for_cuda_with_half_precision_multiplies_in_half_precision() -> None:
    made = program("gpt", torch.bfloat16)
    loss = made.loss(made.model, tuple(map(koila.lazy, made.inputs)))
    smallest = []
    for device, library in (("cpu", 0), ("cuda", 32 << 20)):
        with pytest.raises(koila.errors.BudgetError, match="at the smallest") as refused:
            koila.plan(loss, backward=True, device=device, budget="1KiB")
        smallest.append(refused.value.needed_bytes - library)
    assert smallest[0] != smallest[1]


def test_what_is_free_on_a_device_that_is_not_here_is_not_known() -> None:
    loss = (koila.lazy(torch.ones(4, 2)) * 2).sum()
    with pytest.raises(koila.errors.BudgetError, match="cuda is not here"):
        koila.plan(loss, device="cuda", budget=0.5)
