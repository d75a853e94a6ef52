"""The simulated device itself: numbers are the CPU's, memory is its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.accelerator import sim


@pytest.mark.parametrize(
    "layer", [nn.Linear(8, 8), nn.Conv1d(5, 6, 3), nn.LayerNorm(8)], ids=lambda m: type(m).__name__
)
def test_kernels_are_those_of_the_cpu(layer: nn.Module) -> None:
    given = torch.randn(4, 5, 8)
    on_host = layer(given)
    gradient = torch.autograd.grad(on_host.square().sum(), list(layer.parameters()))
    layer = layer.to("sim")
    on_device = layer(given.to("sim"))
    assert torch.equal(on_device.cpu(), on_host)
    other = torch.autograd.grad(on_device.square().sum(), list(layer.parameters()))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(other, gradient, strict=True))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_cells(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer, given = kind(3, 4, 2, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    on_host = torch.autograd.grad(layer(given)[0].square().sum(), list(layer.parameters()))
    layer = layer.to("sim")
    on_device = torch.autograd.grad(layer(given.to("sim"))[0].square().sum(), list(layer.parameters()))
    assert all(torch.allclose(a.cpu(), b, rtol=1e-12, atol=0) for a, b in zip(on_device, on_host, strict=True))


def test_a_limit_is_hard_and_memory_comes_back() -> None:
    gc.collect()  # What earlier tests left in cycles must not come back in between.
    before = sim.live()
    sim.limit(before + 4096)
    kept = torch.empty(4096, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="SIM out of memory"):
        torch.empty(1, device="sim")
    del kept
    assert sim.live() == before
    assert torch.accelerator.get_memory_info("sim:0")[0] == 4096


def test_an_allocation_fails_on_demand() -> None:
    sim.fail_in(1)
    kept = torch.empty(1, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="asked for"):
        torch.empty(1, device="sim")
    assert torch.empty(1, device="sim").device == kept.device


def test_host_operands_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="sim") + torch.ones(3)


def test_counted_generators_do_not_draw_in_blocks() -> None:
    with sim.counted_generator():
        torch.manual_seed(1)
        whole = torch.rand(64, device="sim")
        state = torch.sim.get_rng_state()
        torch.manual_seed(1)
        blocks = torch.cat([torch.rand(32, device="sim"), torch.rand(32, device="sim")])
        assert state.numel() == 16
        assert not torch.equal(whole, blocks)
        torch.manual_seed(1)
        assert torch.equal(whole, torch.rand(64, device="sim"))


def test_attention_with_dropout_has_the_gradient_of_its_mask() -> None:
    parts = [torch.randn(2, 3, 6, 4, device="sim", dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attention(*given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return F.scaled_dot_product_attention(*given, dropout_p=0.3, is_causal=True)

    with sim.attention(2):
        assert torch.autograd.gradcheck(attention, parts, check_undefined_grad=False)


def test_caching_gives_blocks_and_segments() -> None:
    kept = [torch.empty(1, device=sim.CACHING)]
    live, reserved = sim.live(2), torch.accelerator.memory_reserved(2)
    kept.append(torch.empty(1, device=sim.CACHING))
    assert sim.live(2) - live == 512
    kept.append(torch.empty(2 << 20, dtype=torch.uint8, device=sim.CACHING))
    assert torch.accelerator.memory_reserved(2) - reserved in (0, 20 << 20)


def test_late_copies_show() -> None:
    with sim.asynchronous():
        source, target = torch.ones(4, device="sim"), torch.empty(4, pin_memory=True)
        target.copy_(source, non_blocking=True)
        assert not torch.equal(target, torch.ones(4))
        torch.accelerator.synchronize()
        assert torch.equal(target, torch.ones(4))


class TestStreams:
    """Work on one stream is in order; between streams only where one waits for the other."""

    @pytest.fixture(autouse=True)
    def late(self) -> Iterator[None]:
        with sim.asynchronous():
            yield

    @staticmethod
    def copied(source: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
        target = torch.empty(source.shape, pin_memory=True)
        with stream:
            target.copy_(source, non_blocking=True)
        return target

    def test_what_comes_later_on_a_stream_does_not_reach_an_earlier_copy(self) -> None:
        source = torch.ones(4, device="sim")
        target = self.copied(source, torch.accelerator.current_stream())
        source.add_(1)
        torch.accelerator.synchronize()
        assert torch.equal(target, torch.ones(4))

    def test_a_stream_that_waits_sees_what_was_written(self) -> None:
        source, side = torch.ones(4, device="sim"), torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        target, races = self.copied(source, side), sim.counts()["races"]
        assert not torch.equal(target, torch.ones(4)), "it is late"
        side.synchronize()
        assert torch.equal(target, torch.ones(4)) and sim.counts()["races"] == races

    def test_a_stream_that_does_not_wait_reads_garbage(self) -> None:
        source, races = torch.ones(4, device="sim"), sim.counts()["races"]
        target = self.copied(source, torch.Stream("sim"))
        torch.accelerator.synchronize()
        assert not torch.equal(target, torch.ones(4)) and sim.counts()["races"] == races + 1

    def test_a_write_that_does_not_wait_reaches_the_copy(self) -> None:
        source, side = torch.ones(4, device="sim"), torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        target = self.copied(source, side)
        source.add_(1)
        torch.accelerator.synchronize()
        assert torch.equal(target, 2 * torch.ones(4))

    def test_a_write_that_waits_does_not_reach_the_copy(self) -> None:
        source, side = torch.ones(4, device="sim"), torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        target = self.copied(source, side)
        torch.accelerator.current_stream().wait_stream(side)
        source.add_(1)
        torch.accelerator.synchronize()
        assert torch.equal(target, torch.ones(4))

    @pytest.mark.parametrize("is_recorded", [False, True])
    def test_memory_that_is_freed_too_early_is_lost_unless_its_stream_is_recorded(self, is_recorded: bool) -> None:
        source, side = torch.ones(4, device="sim"), torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        target = self.copied(source, side)
        if is_recorded:
            source.record_stream(side)
        del source
        side.synchronize()
        assert torch.equal(target, torch.ones(4)) == is_recorded

    @pytest.mark.parametrize("waits", [False, True])
    def test_what_another_stream_brings_must_be_waited_for(self, waits: bool) -> None:
        source, target, side = torch.ones(4).pin_memory(), torch.zeros(4, device="sim"), torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(source, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        races = sim.counts()["races"]
        assert torch.equal((target * 1).cpu(), torch.ones(4)) == waits
        assert (sim.counts()["races"] == races) == waits


def test_waiting_is_counted() -> None:
    value = torch.ones(4, device="sim")
    before = sim.counts()["waits"]
    value.sum().item()
    assert sim.counts()["waits"] == before + 1
