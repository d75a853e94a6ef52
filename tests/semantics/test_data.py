"""S5: `.data`, `.grad`, `detach`, buffers that a program writes between reads; what is pending runs before a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import koila

pytestmark = pytest.mark.semantics("S5")
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"allowed": "1MiB"}]


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda t: t.mul_(0.5),
    "add_ of a view": lambda t: t[:1].add_(1.0),
    "lerp_": lambda t: t.lerp_(torch.ones_like(t), 0.1),
    "setitem": lambda t: t.__setitem__(0, 3.0),
    "iadd": lambda t: t.__iadd__(2.0),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
    "zero_ of a detached alias": lambda t: t.detach().zero_(),
    ".data.mul_": lambda t: t.data.mul_(0.5),
    ".data.copy_": lambda t: t.data.copy_(torch.ones_like(t)),
    ".data[0]": lambda t: t.data.__setitem__(0, 1.0),
    ".data of a view": lambda t: t[0].data.zero_(),
    ".data replaced": lambda t: setattr(t, "data", torch.ones_like(t)),
    "init": lambda t: nn.init.constant_(t, 0.25),
    "set_": lambda t: t.set_(torch.ones_like(t)),
    "index_copy_": lambda t: t.index_copy_(0, torch.tensor([1]), torch.ones_like(t[:1])),
    "unbound method": lambda t: torch.Tensor.mul_(t, 3.0),
    "NumPy after .data": lambda t: t.data.numpy().fill(0.0),
    "foreach after .data": lambda t: torch._foreach_mul_([t.data], 2.0),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("name", WRITES)
def test_what_was_recorded_before_a_write_has_the_numbers_of_before(
    name: str, kind: str, budget: dict[str, Any]
) -> None:
    def program(x: torch.Tensor, lazy: bool) -> list[torch.Tensor]:
        table = data(4, 4, seed=1).requires_grad_(kind == "parameter")
        if lazy:
            x = koila.lazy(x)
        before, picked = x @ table, table[x.argmax(1)]
        with torch.no_grad():
            WRITES[name](table)
        return [before, picked, x @ table, table]

    expected = program(data(7, 4), lazy=False)
    with koila.budget(**budget):
        found = koila.run(program(data(7, 4), lazy=True))
    for mine, theirs in zip(found, expected, strict=True):
        equal(mine, theirs)


def test_an_alias_that_was_taken_earlier_is_seen() -> None:
    weight = data(4, 4).requires_grad_()
    alias = weight.data
    found = koila.lazy(data(7, 4)) @ weight
    expected = (data(7, 4) @ weight).detach()
    alias.zero_()
    equal(found.run().detach(), expected)


@pytest.mark.asks_laziness("the value is pending until what it reads is written")
def test_a_write_to_something_else_forces_nothing() -> None:
    weight, other = data(4, 4), data(4, 4)
    found = koila.lazy(data(7, 4)) @ weight
    other.mul_(2.0)
    assert other.data is not None
    assert "pending" in repr(found)
    weight.mul_(2.0)
    assert "ready" in repr(found)
    assert koila.metrics.counter_value("forced::a write to what it reads") == 1


def test_a_write_that_nothing_waits_for_runs_nothing() -> None:
    weight = data(4, 4)
    found = koila.lazy(data(7, 4)) @ weight
    del found
    weight.mul_(2.0)
    assert koila.metrics.counter_value("runs") == 0


def test_what_no_budget_allows_stays_pending_and_is_stale_afterwards() -> None:
    weight = data(4, 4)
    found = koila.lazy(data(64, 4), budget=500) @ weight
    weight.data.mul_(2.0)
    assert koila.metrics.counter_value("readers::left pending") == 1
    with koila.budget(), pytest.raises(koila.KoilaError, match=r"was changed after the call|budget=3616"):
        koila.run(found)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_an_input_written_between_a_value_and_its_backward(chunk_size: int | None) -> None:
    """In chunks the backward pass computes the value again, from its inputs as they were, or not at all."""

    def gradient(wrap: Callable[[torch.Tensor], Any], write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        weight, scale = data(4, seed=1).requires_grad_(), data(4, seed=2)
        value = (wrap(data(7, 4)) * weight * scale).tanh().sum()
        value.item()
        write(scale)
        value.backward()
        assert weight.grad is not None
        return weight.grad

    def read(scale: torch.Tensor) -> Any:
        return scale.data.norm()

    def written(scale: torch.Tensor) -> Any:
        return scale.data.mul_(2.0)

    with koila.budget(chunk_size=chunk_size):
        equal(gradient(koila.lazy, read), gradient(lambda x: x, read))
        if chunk_size is None:
            equal(gradient(koila.lazy, written), gradient(lambda x: x, written))
        else:
            with pytest.raises(koila.StaleInputError, match="changed after the forward pass and before the backward"):
                gradient(koila.lazy, written)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_running_average_between_a_value_and_its_backward(budget: dict[str, Any]) -> None:
    """Eager's autograd has saved nothing of a summand: the write does not concern it. Of a factor it refuses."""

    def gradient(wrap: Callable[[torch.Tensor], Any], combine: Callable[..., Any]) -> torch.Tensor:
        weight, average = data(4, seed=1).requires_grad_(), data(4, seed=2)
        hidden = wrap(data(7, 4)) * weight
        value = (combine(hidden, average).tanh() * hidden).sum()
        average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        value.backward()
        equal(average, 0.9 * data(4, seed=2) + 0.1 * (data(7, 4) * weight.detach()).mean(0))
        assert weight.grad is not None
        return weight.grad

    with koila.budget(**budget):
        equal(gradient(koila.lazy, torch.add), gradient(lambda x: x, torch.add))
        for wrap in (koila.lazy, lambda x: x):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradient(wrap, torch.mul)


class Codebook(nn.Module):
    """A VQ-VAE's codebook with averaged updates, as they are usually written."""

    embed: torch.Tensor
    sizes: torch.Tensor
    average: torch.Tensor

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        embed = data(4, 6, seed=2)
        self.register_buffer("embed", embed)
        self.register_buffer("sizes", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("average", embed.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        index = (-distance).max(1).indices
        hot = F.one_hot(index, 6).to(x.dtype)
        quantized = F.embedding(index, self.embed.transpose(0, 1))
        if self.training:
            self._update(x, hot)
        difference = (quantized.detach() - x).pow(2).mean()
        return x + (quantized - x).detach(), difference

    def _update(self, x: torch.Tensor, hot: torch.Tensor) -> None:
        pick = (lambda t: t.data) if self.by_data else (lambda t: t)
        with torch.no_grad():
            pick(self.sizes).mul_(0.9).add_(hot.sum(0), alpha=0.1)
            pick(self.average).mul_(0.9).add_(x.transpose(0, 1) @ hot, alpha=0.1)
            total = self.sizes.sum()
            smoothed = (self.sizes + 1e-5) / (total + 6e-5) * total
            pick(self.embed).copy_(self.average / smoothed.unsqueeze(0))


def train(wrap: Callable[[torch.Tensor], torch.Tensor], by_data: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(5, 4).double(), nn.Linear(4, 5).double()
    codebook = Codebook(by_data)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), list[torch.Tensor]()
    for step in range(3):
        x = wrap(data(9, 5, seed=step))
        code, difference = codebook(encoder(x))
        loss = F.mse_loss(decoder(code), x) + difference
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(torch.tensor(loss.item(), dtype=torch.float64))
    return [*losses, *(p.detach() for p in parameters), *codebook.buffers()]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("by_data", [False, True])
def test_a_codebook_with_averaged_updates_trains_as_in_eager(by_data: bool, budget: dict[str, Any]) -> None:
    expected = train(lambda x: x, by_data)
    with koila.budget(**budget):
        found = train(koila.lazy, by_data)
    for mine, theirs in zip(found, expected, strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_averages_of_weights_and_vectors_of_parameters(budget: dict[str, Any]) -> None:
    """EMA by `.data`, by `AveragedModel`, and `vector_to_parameters`, while values on the weights are pending."""

    def program(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, slow = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        average = torch.optim.swa_utils.AveragedModel(model)
        outputs: list[torch.Tensor] = []
        for step in range(2):
            x = wrap(data(7, 4, seed=step))
            outputs += [slow(x), average(x), model(x)]
            for mine, theirs in zip(slow.parameters(), model.parameters(), strict=True):
                mine.data = 0.9 * mine.data + 0.1 * theirs.data
            average.update_parameters(model)
            vector = nn.utils.parameters_to_vector(model.parameters()) * 1.5
            nn.utils.vector_to_parameters(vector, model.parameters())
            outputs.append(model(x))
        return [*koila.run(outputs, detach=True), *(p.detach() for p in (*slow.parameters(), *average.parameters()))]

    expected = [each.detach() for each in program(lambda x: x)]
    with koila.budget(**budget):
        found = program(koila.lazy)
    for mine, theirs in zip(found, expected, strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_module_that_is_converted_while_values_on_it_are_pending(budget: dict[str, Any]) -> None:
    model = nn.Linear(4, 3).double()
    expected = model(data(7, 4)).detach()
    with koila.budget(**budget):
        found = model(koila.lazy(data(7, 4)))
        model.float()
        equal(found.run().detach(), expected)


@pytest.mark.parametrize("budget", BUDGETS)
def test_data_of_a_real_tensor_is_set_to_a_lazy_value(budget: dict[str, Any]) -> None:
    def program(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        x = wrap(data(7, 4))
        before = (x + weight).sum()
        weight.data = x.mean(0)
        (x * weight).sum().backward()
        assert weight.grad is not None
        return [before, weight, weight.grad]

    expected = program(lambda x: x)
    with koila.budget(**budget):
        found = koila.run(program(koila.lazy))
    for mine, theirs in zip(found, expected, strict=True):
        equal(mine.detach(), theirs.detach())


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_gradient_that_is_lazy(budget: dict[str, Any]) -> None:
    def program(wrap: Callable[[torch.Tensor], torch.Tensor], fused: bool) -> list[torch.Tensor]:
        weights = [nn.Parameter(data(4, seed=s)) for s in (1, 2)]
        optimizer = torch.optim.Adam(weights, lr=0.1, foreach=fused)
        x = wrap(data(7, 4))
        weights[0].grad = x.mean(0)
        (x * weights[0] * weights[1]).sum().backward()
        assert weights[0].grad is not None
        norm = nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return [norm, *weights, weights[0].grad, weights[0].grad * 2]

    for fused in (False, True):
        expected = program(lambda x: x, fused)
        with koila.budget(**budget):
            found = koila.run(program(koila.lazy, fused))
        for mine, theirs in zip(found, expected, strict=True):
            equal(mine.detach(), theirs.detach())


@pytest.mark.parametrize("budget", BUDGETS)
def test_data_and_detach_of_lazy_values_are_aliases(budget: dict[str, Any]) -> None:
    def program(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        w = data(4, seed=1).requires_grad_()
        h = wrap(data(7, 4)) * w
        alias, view = h.data, h.detach()
        alias.add_(1.0)
        loss = (h * 2).sum() + view.sum()
        loss.backward()
        assert w.grad is not None and not alias.requires_grad
        return [h, alias, view, loss, w.grad]

    expected = program(lambda x: x)
    with koila.budget(**budget):
        found = koila.run(program(koila.lazy))
    for mine, theirs in zip(found, expected, strict=True):
        equal(mine.detach(), theirs.detach())


@pytest.mark.asks_laziness("only a pending value has no data that could be replaced")
def test_data_of_a_lazy_value_cannot_be_replaced() -> None:
    x = koila.lazy(data(7, 4))
    with pytest.raises(koila.CaptureError, match=r"assigning \.data is not possible on a lazy tensor"):
        x.data = data(7, 4)


@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_functional_call_with_lazy_state(budget: dict[str, Any]) -> None:
    model = nn.Linear(4, 3).double()
    with koila.budget(**budget):
        x = koila.lazy(data(7, 4))
        found = torch.func.functional_call(model, {"weight": x[:3] * 2, "bias": model.bias + 1}, (x,))
        expected = torch.func.functional_call(
            model, {"weight": data(7, 4)[:3] * 2, "bias": model.bias + 1}, (data(7, 4),)
        )
        equal(found.run().detach(), expected.detach())


@pytest.mark.semantics("S11")
@pytest.mark.parametrize("budget", BUDGETS[:2])
def test_gradcheck_perturbs_its_inputs_through_data(budget: dict[str, Any]) -> None:
    weight = data(2).requires_grad_()

    def function(w: torch.Tensor) -> torch.Tensor:
        return ((koila.lazy(data(3, 2, seed=3)) * w).tanh() @ w).sum()

    with koila.budget(**budget):
        assert torch.autograd.gradcheck(function, (weight,))
        assert torch.autograd.gradgradcheck(function, (weight,))


def test_methods_that_write_stay_what_they_were_for_others() -> None:
    """Compiled code and pickles name the methods; without anything lazy they do what they did."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        x[0] = 1
        x += 1
        torch.Tensor.add_(x, x.data)
        return x

    koila.lazy(data(2))
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    equal(compiled(data(3)), function(data(3)))
    assert torch.Tensor.mul_.__name__ == "mul_" and torch.Tensor.mul_.__doc__ == torch._C.TensorBase.mul_.__doc__
