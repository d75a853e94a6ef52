"""Programs of two ranks with every collective of `torch.distributed` on tensors that may be lazy.

`make` makes a tensor lazy, or leaves it as it is. The operands are computed, so that they are pending if they are lazy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from tests.distributed.ranks import Program, Way

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def pending(rank: int, make: Way, size: int = 4, requires_grad: bool = False) -> torch.Tensor:
    """A tensor of this rank's own, computed from one that may be lazy."""
    x = torch.arange(float(size * 3), dtype=torch.float64).reshape(size, 3).add(10 * rank)
    return make(x.requires_grad_(requires_grad)) * 2


def zeros(make: Way, size: int = 4, num: int = 2) -> list[torch.Tensor]:
    """Computed tensors to receive into."""
    return [make(torch.ones(size, 3, dtype=torch.float64)) - 1 for _ in range(num)]


# In place, one tensor.


@program
def all_reduce(rank: int, make: Way) -> Any:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        x = pending(rank, make)
        assert dist.all_reduce(x, op=op) is None
        found.append(x)
    return found


@program
def all_reduce_of_an_input(rank: int, make: Way) -> Any:
    real = torch.full((4, 3), rank + 1.0, dtype=torch.float64)
    x = make(real)
    dist.all_reduce(x)
    return x, real  # The user's own tensor is what eager writes to.


@program
def all_reduce_async(rank: int, make: Way) -> Any:
    x, y = pending(rank, make), pending(rank, make) + 1
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    for work in works:
        work.wait()
    z = x + y
    return x, y, z, z.sum()


@program
def all_reduce_future(rank: int, make: Way) -> Any:
    x = pending(rank, make)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    return future.wait(), x


@program
def all_reduce_of_a_loss(rank: int, make: Way) -> Any:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = (pending(rank, make) @ weight).square().mean()
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    loss.backward()
    return logged / 2, loss, weight.grad


@program
def all_reduce_after_backward(rank: int, make: Way) -> Any:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = (pending(rank, make) @ weight).square().mean()
    loss.backward()
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return logged, weight.grad


@program
def broadcast(rank: int, make: Way) -> Any:
    x, y = pending(rank, make), pending(rank, make)
    dist.broadcast(x, 1)
    dist.broadcast(y, 0, async_op=True).wait()
    return x, y, x - y


@program
def reduce(rank: int, make: Way) -> Any:
    x = pending(rank, make)
    dist.reduce(x, 1)
    return x if rank == 1 else None  # Elsewhere it is undefined.


@program
def all_reduce_coalesced(rank: int, make: Way) -> Any:
    tensors = [pending(rank, make), pending(rank, make) + 1]
    dist.all_reduce_coalesced(tensors)
    return tensors


# From one tensor into others.


@program
def all_gather(rank: int, make: Way) -> Any:
    into = [torch.zeros(4, 3, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(into, pending(rank, make))
    into_lazy = zeros(make)
    dist.all_gather(into_lazy, pending(rank, make), async_op=True).wait()
    real = [torch.full((4, 3), float(rank), dtype=torch.float64), *zeros(make)]
    dist.all_gather(real[1:], real[0])
    return into, into_lazy, real, [tensor.sum() for tensor in into_lazy]


@program
def all_gather_single(rank: int, make: Way) -> Any:
    into, into_lazy = torch.zeros(8, 3, dtype=torch.float64), zeros(make, 8)[0]
    dist.all_gather_single(into, pending(rank, make))
    dist.all_gather_into_tensor(into_lazy, pending(rank, make))
    into_real = zeros(make, 8)[0]
    dist.all_gather_single(into_real, torch.ones(4, 3, dtype=torch.float64) + rank)
    return into, into_lazy, into_real


@program
def all_gather_coalesced(rank: int, make: Way) -> Any:
    into = [zeros(make), zeros(make)]
    dist.all_gather_coalesced(into, [pending(rank, make), pending(rank, make) + 1])
    return into


@program
def gather(rank: int, make: Way) -> Any:
    into = zeros(make) if rank == 0 else None
    dist.gather(pending(rank, make), into, dst=0)
    return into


@program
def scatter(rank: int, make: Way) -> Any:
    into = zeros(make)[0]
    dist.scatter(into, [pending(0, make), pending(1, make)] if rank == 1 else None, src=1)
    into_real = torch.zeros(4, 3, dtype=torch.float64)
    dist.scatter(into_real, [pending(0, make), pending(1, make)] if rank == 0 else None, src=0)
    return into, into_real


@program
def reduce_scatter(rank: int, make: Way) -> Any:
    into = torch.zeros(4, 3, dtype=torch.float64)  # Real, so that PyTorch itself does not see that others are lazy.
    dist.reduce_scatter(into, [pending(rank, make), pending(rank, make) + 1])
    into_lazy = zeros(make)[0]
    dist.reduce_scatter(into_lazy, [pending(rank, make), pending(rank, make) + 1])
    return into, into_lazy


@program
def reduce_scatter_single(rank: int, make: Way) -> Any:
    into, into_lazy = torch.zeros(2, 3, dtype=torch.float64), zeros(make, 2)[0]
    dist.reduce_scatter_single(into, pending(rank, make))
    dist.reduce_scatter_tensor(into_lazy, pending(rank, make), async_op=True).wait()
    return into, into_lazy


@program
def all_to_all(rank: int, make: Way) -> Any:
    into = zeros(make, 2)
    dist.all_to_all(into, list(pending(rank, make).chunk(2)))
    single = zeros(make)[0]
    dist.all_to_all_single(single, pending(rank, make))
    real = torch.zeros(4, 3, dtype=torch.float64)
    dist.all_to_all_single(real, pending(rank, make))
    return into, single, real


# From one rank to another.


@program
def send_and_receive(rank: int, make: Way) -> Any:
    into = zeros(make)
    if rank == 0:
        dist.send(pending(rank, make), 1)
        dist.recv(into[0], 1)
    else:
        dist.recv(into[0], 0)
        dist.send(pending(rank, make), 0)
    works = [dist.isend(pending(rank, make) + 1, 1 - rank), dist.irecv(into[1], 1 - rank)]
    for work in works:
        work.wait()
    return into, into[0] + into[1]


@program
def batch_of_sends(rank: int, make: Way) -> Any:
    into = zeros(make)[0]
    operations = [dist.P2POp(dist.isend, pending(rank, make), 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return into


# Objects.


@program
def objects(rank: int, make: Way) -> Any:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"x": pending(rank, make), "rank": rank})
    into: list[Any] = [None, None]
    dist.gather_object(pending(rank, make), into if rank == 0 else None, dst=0)
    sent = [pending(rank, make), rank]
    dist.broadcast_object_list(sent, src=1)
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([pending(rank, make)], dst=1)
    else:
        dist.recv_object_list(received, src=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [pending(0, make), pending(1, make)] if rank == 0 else None, src=0)
    return gathered, into, sent, received, scattered


# Functional collectives, and those with a gradient.


@program
def functional_collectives(rank: int, make: Way) -> Any:
    world = dist.group.WORLD
    reduced = functional.all_reduce(pending(rank, make), "sum", world)
    gathered = functional.all_gather_tensor(pending(rank, make), 0, world)
    scattered = functional.reduce_scatter_tensor(pending(rank, make), "sum", 0, world)
    sent = functional.broadcast(pending(rank, make), 1, world)
    several = functional.all_reduce_coalesced([pending(rank, make), pending(rank, make) + 1], "sum", world)
    swapped = functional.all_to_all_single(pending(rank, make), [2, 2], [2, 2], world)
    waited = functional.wait_tensor(functional.all_reduce(pending(rank, make), "max", world))
    return [reduced + 0, gathered * 2, scattered - 1, sent + 0, [t + 0 for t in several], swapped + 0, waited]


@program
def functional_with_gradients(rank: int, make: Way) -> Any:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    hidden = pending(rank, make) * weight
    gathered = functional.all_gather_tensor_autograd(hidden, 0, dist.group.WORLD)
    loss = (gathered * torch.arange(8.0, dtype=torch.float64).unsqueeze(1)).sin().sum()
    loss.backward()
    return loss, weight.grad


@program
def differentiable_collectives(rank: int, make: Way) -> Any:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    hidden = (pending(rank, make) * weight).sin()
    total = differentiable.all_reduce(hidden.sum(0))
    rows = torch.cat(differentiable.all_gather((hidden - total).cos()))
    loss = (rows @ rows.T).tanh().mean()
    loss.backward()
    return loss, weight.grad


# What is pending around a collective.


@program
def readers_see_what_was_before(rank: int, make: Way) -> Any:
    x = make(torch.full((4, 3), rank + 1.0, dtype=torch.float64))
    y = pending(rank, make)
    before, product = x * 3, y * 5
    dist.all_reduce(x)
    dist.all_reduce(y)
    return before, product, x * 3, y * 5


@program
def views_see_what_comes_after(rank: int, make: Way) -> Any:
    x = pending(rank, make)
    row, flat = x[1], x.view(-1)
    dist.all_reduce(x)
    y = pending(rank, make)
    part = y[:2]
    dist.broadcast(part, 0)
    return row, flat, x, part, y


@program
def real_tensors_that_pending_calls_read(rank: int, make: Way) -> Any:
    table = torch.full((3,), rank + 1.0, dtype=torch.float64)
    total = torch.full((3,), rank + 1.0, dtype=torch.float64)
    before = pending(rank, make) * table
    dist.all_reduce(table)
    between = pending(rank, make) * table + total
    dist.broadcast(table, 1)
    dist.all_gather([total, torch.zeros(3, dtype=torch.float64)], table)
    return before, between, table, total, pending(rank, make) * table


@program
def statistics_that_pending_calls_write(rank: int, make: Way) -> Any:
    norm = torch.nn.BatchNorm1d(3).double()
    out = norm(pending(rank, make))
    dist.all_reduce(norm.running_mean)
    again = norm(pending(rank, make) + 1)
    return out, again, norm.state_dict()


@program
def a_group_and_a_barrier(rank: int, make: Way) -> Any:
    group = dist.new_group([0])
    x = pending(rank, make)
    if rank == 0:
        dist.all_reduce(x, group=group)
    dist.barrier()
    return x


@program
def nobody_reads_the_result(rank: int, make: Way) -> Any:
    """Rank 1 forgets its tensor: rank 0 still gets its part."""
    x = pending(rank, make)
    dist.all_reduce(x)
    functional.wait_tensor(functional.all_reduce(pending(rank, make), "sum", dist.group.WORLD))
    return x if rank == 0 else None
