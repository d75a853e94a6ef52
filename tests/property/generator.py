"""Random programs: lines of PyTorch over a batch, parameters, constants and buffers.

*Takes* a seed. *Gives* the `Program` of that seed; its text is the reproduction, it can be pasted into a file.
"""

from __future__ import annotations

from random import Random

import torch

from tests.property.draft import Draft, Program, Refused, prune
from tests.property.habits import HABITS
from tests.property.operators import CLASSES, FAMILIES

BATCHES = (1, 2, 3, 5, 7, 8)

SCALARS = (
    "{}.sum()",
    "{}.mean()",
    "{}.square().mean()",
    "{}.square().sum()",
    "{}.logsumexp(dim=0).sum()",
    "{}.amax()",
    "{}.var(correction=0)",
    "({} + 0.1).norm()",
    "({0} * w.reshape(-1, *[1] * ({0}.ndim - 1))).sum() / w.sum()",
    "{}.mean(0).square().sum()",
    "{}.std(0).sum()",
)


def _data(d: Draft) -> dict[str, torch.Tensor]:
    batch, random = d.batch, d.random
    shape = (batch, *(d.size() for _ in range(random.randint(1, 3))))
    integers = lambda *sizes: torch.randint(0, CLASSES, sizes, generator=d.generator)  # noqa: E731
    x = d.normal(shape) * 2
    return {
        "x": x.requires_grad_() if random.random() < 0.3 else x,
        "y": integers(batch),
        "t": integers(batch, d.size()),
        "w": d.normal((batch,)).abs() + 0.1,
    }


def make(seed: int, habits: bool = False) -> Program:
    """The program of a seed; with `habits`, people's habits stand among its operators."""
    random = Random(seed)
    batch = random.choice(BATCHES)
    d = Draft(random, batch, torch.Generator().manual_seed(seed))
    inputs = _data(d)
    d.values = {name: value.detach().clone().requires_grad_(value.requires_grad) for name, value in inputs.items()}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        _fill(d, habits)
        mode = random.choices(("loss", "read", "output", "inference"), (6, 1, 2, 1))[0]
        result = _loss(d) if mode in ("loss", "read") else d.pick()
    finally:
        torch.set_rng_state(state)
    others = [name for name in d.values if name[0] == "v" and name != result]
    held = tuple(random.sample(others, min(len(others), random.choice((0, 0, 1, 2)))))
    return prune(Program(seed, batch, inputs, d.starts, d.lines, result, held, mode))


def _fill(d: Draft, habits: bool) -> None:
    families, weights = zip(*FAMILIES, *(HABITS if habits else ()), strict=True)
    for _ in range(d.random.randint(4, 12)):
        for _ in range(20):
            try:
                d.random.choices(families, weights)[0](d)
                break
            except Refused:
                continue


def _loss(d: Draft) -> str:
    """A sum of scalars, mostly of values that nothing else reads."""
    terms: list[str] = []
    for _ in range(10):
        unread = [name for name in d.unread() if d.values[name].is_floating_point() and d.values[name].ndim >= 1]
        source = d.random.choice(unread) if unread and d.random.random() < 0.8 else None
        try:
            source = source or d.pick(lambda value: value.ndim >= 1)
            terms.append(d.assign(d.random.choice(SCALARS).format(source)))
        except Refused:
            continue
        if len(terms) == 3 or d.random.random() < 0.3:
            break
    try:
        return d.assign(" + ".join(terms) or "x.sum()")
    except Refused:  # Each of them is small enough, their sum is not.
        return terms[0]
