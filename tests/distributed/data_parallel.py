"""Training loops of two ranks under DistributedDataParallel, with each of its options; `make` may make inputs lazy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.ranks import Program, Way

PROGRAMS: dict[str, Program] = {}
WITH_STATISTICS: dict[str, Program] = {}

NUM_SAMPLES = 7
NUM_STEPS = 3


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def program_with_statistics(function: Program) -> Program:
    WITH_STATISTICS[function.__name__] = function
    return function


class Net(nn.Module):
    """Two branches of which a call may use one, a norm if it is asked for, and a layer that nothing uses."""

    def __init__(self, norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8, bias=not norm)  # Before a norm, the gradient of a bias is nothing but noise.
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4) if unused else None

    def forward(self, x: torch.Tensor, branch: str = "both") -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        for name in ("left", "right") if branch == "both" else () if branch == "none" else (branch,):
            hidden = torch.relu(getattr(self, name)(hidden))
        return self.last(hidden)


def net(kind: Callable[..., nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).double()


def batch(rank: int, step: int = 0, num_samples: int = NUM_SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, and the gradients that are there."""
    grads = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return {**model.state_dict(), **{name: None if g is None else g.clone() for name, g in grads.items()}}


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def train(rank: int, make: Way, model: nn.Module, loss_of: Loss = cross_entropy, num_steps: int = NUM_STEPS) -> Any:
    """A plain training loop; returns the losses and the state of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, *make(*batch(rank, step)))
        loss.backward()
        optimizer.step()
        seen.append({"loss": loss.detach().clone(), **state(model)})
    return seen


# Options of DDP.


@program
def plain(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net()))


@program
def small_buckets(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(), bucket_cap_mb=1e-4))


@program
def gradient_as_bucket_view(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(), gradient_as_bucket_view=True))


@program
def static_graph(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(), static_graph=True))


@program
def static_graph_with_unused_parameters(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(unused=True), static_graph=True, gradient_as_bucket_view=True)
    return train(rank, make, model)


class Twice(Net):
    def forward(self, x: torch.Tensor, branch: str = "both") -> torch.Tensor:
        hidden = self.right(checkpoint(self.left, torch.tanh(self.first(x)), use_reentrant=False))
        return self.last(self.left(hidden))


@program
def static_graph_with_checkpoints_and_a_layer_used_twice(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(Twice), static_graph=True))


@program
def unused_parameters(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(unused=True), find_unused_parameters=True))


@program
def another_branch_in_each_rank(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(unused=True), find_unused_parameters=True)
    branches = iter(["left", "right", "none"] if rank else ["right", "none", "none"])
    return train(rank, make, model, lambda m, x, y: F.cross_entropy(m(x, next(branches)), y))


class Several(Net):
    """Several outputs in a structure, of which a loss uses some."""

    def forward(self, x: torch.Tensor, branch: str = "both") -> Any:
        hidden = torch.tanh(self.first(x))
        guess = self.last(hidden)
        return {
            "used": guess,
            "not used": self.left(hidden),
            "no gradient": self.right(hidden).detach(),
            "indices": (guess.argmax(1), x.shape[0], None),
        }


def of_several(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return F.cross_entropy(found["used"], y) + found["no gradient"].mean() + found["indices"][0].sum()


@program
def outputs_that_the_loss_does_not_use(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(Several), find_unused_parameters=True), of_several)


@dataclass
class Output:
    guess: torch.Tensor
    hidden: torch.Tensor


class InADataclass(Net):
    def forward(self, x: torch.Tensor, branch: str = "both") -> Any:
        hidden = torch.tanh(self.first(x))
        return Output(self.last(hidden), hidden)


@program
def outputs_in_a_dataclass(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(InADataclass), find_unused_parameters=True)
    return train(rank, make, model, lambda m, x, y: F.cross_entropy(m(x).guess, y))


@program
def no_sync(rank: int, make: Way) -> Any:
    models = (
        DistributedDataParallel(net()),
        DistributedDataParallel(net(unused=True), find_unused_parameters=True),
        DistributedDataParallel(net(), gradient_as_bucket_view=True),
    )
    return [_accumulated(rank, make, model) for model in models]


def _accumulated(rank: int, make: Way, model: DistributedDataParallel) -> Any:
    seen: list[Any] = []
    for step in range(4):
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            (cross_entropy(model, *make(*batch(rank, step))) / 2).backward()
        seen.append(state(model))
    return seen


@program
def join(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net())
    with model.join():
        seen = train(rank, make, model, num_steps=2 + rank)
    return seen, state(model)


@program
def join_with_unused_parameters(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(unused=True), find_unused_parameters=True)
    with model.join(divide_by_initial_world_size=False):
        seen = train(rank, make, model, num_steps=3 - rank)
    return seen, state(model)


@program
def communication_hooks(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return train(rank, make, model)


@program
def optimizer_in_parts(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        cross_entropy(model, *make(*batch(rank, step))).backward()
        optimizer.step()
    return state(model)


# What loops do beside.


@program
def loss_read_before_backward(rank: int, make: Way) -> Any:
    losses: list[float] = []

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, x, y)
        losses.append(round(loss.item(), 12))
        return loss

    seen = [
        train(rank, make, DistributedDataParallel(net(unused=True), **options), loss_of)
        for options in ({"find_unused_parameters": True}, {"static_graph": True})
    ]
    return seen, losses


@program
def two_models_in_one_loss(rank: int, make: Way) -> Any:
    one = DistributedDataParallel(net(unused=True), find_unused_parameters=True)
    other = DistributedDataParallel(net(), static_graph=True)
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        x, y = make(*batch(rank, step))
        loss = F.cross_entropy(one(x) - other(x), y) + one(x + 1).square().mean()
        loss.backward()
        seen += [state(one), state(other)]
    return seen


@program
def evaluation_between_steps(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(unused=True), find_unused_parameters=True)
    seen: list[Any] = []
    for step in range(2):
        seen.append(train(rank, make, model, num_steps=1))
        with torch.no_grad():
            seen.append(model(make(batch(rank, step)[0])) * 2)
    return seen


def another_budget_in_each_rank(rank: int, make: Way) -> Any:
    found: list[Any] = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = DistributedDataParallel(net(), **options)
        for step in range(2):
            data = batch(rank, step, num_samples=600)
            cross_entropy(model, *make(*data, budget=("1MiB", "120KiB")[rank])).backward()
            found.append(state(model))
    return found


# BatchNorm: statistics are broadcast before each forward pass in training.


@program_with_statistics
def statistics(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(norm=True)))


@program_with_statistics
def statistics_that_are_not_broadcast(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(norm=True), broadcast_buffers=False))


def _two_forwards(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x[:4]).square().mean() + F.cross_entropy(model(x[2:]), y[2:])


@program_with_statistics
def two_forwards_before_a_backward(rank: int, make: Way) -> Any:
    return train(rank, make, DistributedDataParallel(net(norm=True), find_unused_parameters=True), _two_forwards)


@program_with_statistics
def two_forwards_of_unequal_lazy_inputs(rank: int, make: Way) -> Any:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other = make(batch(rank, 7, num_samples=5)[0])
        return model(x).square().mean() - model(other).mean()

    return train(rank, make, DistributedDataParallel(net(norm=True)), loss_of)


@program_with_statistics
def join_with_statistics(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(norm=True))
    with model.join():
        seen = train(rank, make, model, num_steps=2 + rank)
    return seen, state(model)


@program_with_statistics
def statistics_in_evaluation(rank: int, make: Way) -> Any:
    model = DistributedDataParallel(net(norm=True))
    seen: list[Any] = []
    for step in range(2):
        out = model(make(batch(rank, step)[0]))  # Nobody differentiates it: DDP broadcasts all the same.
        seen.append(train(rank, make, model, num_steps=1))
        model.eval()
        with torch.no_grad():
            seen += [out, model(make(batch(rank, step)[0]))]
        model.train()
    return seen, state(model)
