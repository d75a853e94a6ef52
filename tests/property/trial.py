"""One random program, run eagerly and through koila, whole and in chunks.

*Takes* a `Program`. *Gives* None, or the first thing that differs. Results are compared per tensor,
‖a−b‖ ≤ 1e-10·‖b‖; what eager itself does not know that well is measured by running it again on inputs that differ in
their last bits, and a program whose results jump then is discarded.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from random import Random
from types import CodeType
from typing import TypeAlias

import torch

import koila
from tests.property.draft import Program, prune
from tests.property.environment import Later, Notes, environment

Recorded: TypeAlias = Callable[..., list[torch.Tensor]]

TOLERANCE = 1e-10
ROUNDING = 1e-13
"""What is zero in exact arithmetic is this large at most: the values of the programs are of the order of one."""


class Discarded(Exception):
    """Eager refuses the program, or its numbers say nothing."""


@dataclass(frozen=True)
class Outcome:
    """What is left after a program."""

    tensors: dict[str, torch.Tensor]
    """Values, gradients and buffers, by name."""
    generator: torch.Tensor


def _copies(tensors: dict[str, torch.Tensor], perturb: torch.Generator | None) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().clone()
        if perturb is not None and copy.is_floating_point():
            copy *= 1 + 1e-14 * torch.randn(copy.shape, generator=perturb, dtype=copy.dtype)
        found[name] = copy.requires_grad_(tensor.requires_grad)
    return found


@lru_cache(1)
def _code(text: str) -> CodeType:
    """Compiled once: in a loop, a call stands at one place."""
    return compile(text, "<program>", "exec")


def _function(program: Program, seen: Notes | None = None, later: Later | None = None) -> Recorded:
    scope = environment(seen, later)
    exec(_code(program.text), scope)
    return scope["program"]


def run(
    program: Program, lazy: bool = False, chunk_size: int | None = None, perturb: torch.Generator | None = None,
    allowed: int | None = None, elsewhere: bool = False,
) -> Outcome:  # fmt: skip
    """Run a program on copies of its data.

    Args:
        program: The program.
        lazy: Whether its inputs are made lazy.
        chunk_size: Samples per chunk.
        perturb: Changes the last bits of the data.
        allowed: A byte budget, given to the inputs.
        elsewhere: Whether the program is recorded in another thread than the one that asks for its results.
    """
    inputs, tensors = _copies(program.inputs, perturb), _copies(program.tensors, perturb)
    torch.manual_seed(program.seed)
    given = koila.lazy(inputs, budget=allowed) if lazy else inputs
    seen, later = Notes(), Later()
    with koila.budget(chunk_size=chunk_size), torch.set_grad_enabled(program.mode != "inference"):
        call = partial(_function(program, seen, later), **given, **tensors)
        values = _in_another_thread(call) if elsewhere else call()
        found = _finish(program, values)
        if lazy:
            koila.settle()
    for name, noted in seen.items():
        found.update({f"what hook {number} on {name} saw": each for number, each in enumerate(noted)})
    for number, ask in enumerate(later):
        gradient = ask()
        if gradient is not None:
            found[f"retained gradient {number}"] = gradient
    found.update(left_in({**inputs, **tensors}))
    return Outcome(found, torch.get_rng_state())


def left_in(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a program leaves in the tensors that it starts from: buffers, parameters, gradients."""
    kinds = {"r": "buffer", "p": "parameter"}
    found = {f"{kinds[name[0]]} {name}": tensor.detach() for name, tensor in tensors.items() if name[0] in kinds}
    gradients = {f"gradient of {name}": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    return {**found, **gradients}


def record(program: Program) -> list[torch.Tensor]:
    """The values of a program that is recorded on copies of its data, and not asked for anything."""
    torch.manual_seed(program.seed)
    with torch.set_grad_enabled(program.mode != "inference"):
        given = koila.lazy(_copies(program.inputs, None))
        return _function(program)(**given, **_copies(program.tensors, None))


def _in_another_thread(call: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Grad mode and scopes are those of a thread: it takes over this one's."""
    enabled, context = torch.is_grad_enabled(), copy_context()

    def inside() -> list[torch.Tensor]:
        with torch.set_grad_enabled(enabled):
            return context.run(call)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(inside).result()


def _finish(program: Program, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ask for the results in the way of the program's mode."""
    result = values[0]
    if program.mode == "loss":
        if result.requires_grad:
            result.backward()
        found = [koila.run(value, detach=True) for value in values]
    elif program.mode == "read":
        found = [value.detach().clone() for value in koila.run(values)]
        if result.requires_grad:
            result.backward()
    else:
        found = koila.run(values)
        if found[0].requires_grad:
            seed = torch.arange(1, found[0].numel() + 1, dtype=found[0].dtype).view(found[0].shape) / found[0].numel()
            found[0].backward(seed)
        found = [value.detach() for value in found]
    return {f"value {name}": value.detach() for name, value in zip((program.result, *program.held), found, strict=True)}


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    return float((found - expected).detach().norm())


def reference(program: Program) -> tuple[Outcome, dict[str, float]]:
    """Eager's outcome, and how far each tensor may be from it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = run(program)
            shaken = [run(program, perturb=torch.Generator().manual_seed(number)) for number in range(6)]
    except Exception as error:
        raise Discarded(f"{type(error).__name__}: {error}") from error
    if any(other.tensors.keys() != expected.tensors.keys() for other in shaken):
        raise Discarded("other tensors are left if the last bits are others")
    allowed = {}
    for name, tensor in expected.tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise Discarded(f"{name} is not finite")
        size = float(tensor.detach().norm()) if tensor.is_floating_point() else 0.0
        jump = max(_difference(other.tensors[name], tensor) for other in shaken)
        if jump > 1e-11 * max(1.0, size):
            raise Discarded(f"{name} is ill conditioned: {jump:.1e}")
        allowed[name] = max(TOLERANCE * size, 1000 * jump, ROUNDING)
    return expected, allowed


def compare(found: Outcome, expected: Outcome, allowed: dict[str, float] | None) -> str | None:
    """The first difference; `allowed` None asks for the same bits."""
    if found.tensors.keys() != expected.tensors.keys():
        return f"tensors {sorted(found.tensors.keys() ^ expected.tensors.keys())} are in one of the two only"
    for name, tensor in expected.tensors.items():
        mine = found.tensors[name]
        if type(mine) is not torch.Tensor:
            return f"{name} is a {type(mine).__name__}"
        error = _difference(mine, tensor)
        if allowed is None and not (error == 0.0 and torch.equal(mine, tensor)):
            return f"{name} has other bits: {error:.1e}"
        if allowed is not None and not error <= allowed[name]:
            return f"{name} differs by {error:.1e}, {allowed[name]:.1e} is allowed"
    return None if torch.equal(found.generator, expected.generator) else "the generator stands elsewhere"


def illegal() -> str | None:
    """A chunk that its own types refuse: the run fell back and is right, the rule is not."""
    return next((name for name in koila.metrics.counter_names() if "chunks are illegal" in name), None)


def chunk_sizes(program: Program, count: int = 2) -> list[int | None]:
    """Unsplit, one and others, uneven ones first."""
    batch = program.batch
    sizes = list(range(1, batch))
    Random(program.seed).shuffle(sizes)
    sizes.sort(key=lambda size: batch % size == 0)
    chosen = sizes[: count - 1] + ([1] if 1 not in sizes[: count - 1] and batch > 1 else [])
    return [None, *chosen]


def trial(program: Program, sizes: Sequence[int | None] | None = None) -> str | None:
    """What differs between eager and koila, or None.

    Raises:
        Discarded: The program is none.
    """
    expected, allowed = reference(program)
    for chunk_size in chunk_sizes(program) if sizes is None else sizes:
        koila.metrics.reset()
        try:
            found = run(program, lazy=True, chunk_size=chunk_size)
        except Exception as error:
            return f"chunk size {chunk_size}: {described(error)}"
        difference = compare(found, expected, None if chunk_size is None else allowed) or illegal()
        if difference is not None:
            return f"chunk size {chunk_size}: {difference}"
    return None


def described(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def reduced(program: Program, wrong: Callable[[Program], str | None], tries: int = 150) -> Program:
    """A smaller program that is wrong, too: lines are left out, values are replaced by earlier ones."""

    def fails(candidate: Program) -> bool:
        try:
            return wrong(candidate) is not None
        except Exception:
            return False

    changed = True
    while changed and tries > 0:
        changed = False
        for candidate in _smaller(program):
            tries -= 1
            if fails(candidate):
                program, changed = candidate, True
                break
            if tries <= 0:
                break
    return prune(program)


def _smaller(program: Program) -> list[Program]:
    found = [replace(program, held=())] if program.held else []
    for number in reversed(range(len(program.lines))):
        rest = [*program.lines[:number], *program.lines[number + 1 :]]
        found.append(replace(program, lines=rest))
        name, _, expression = program.lines[number].partition(" = ")
        for other in dict.fromkeys(re.findall(r"\b[vxw]\d*\b", expression)):
            lines = [re.sub(rf"\b{re.escape(name)}\b", other, line) for line in rest]
            found.append(replace(program, lines=lines, result=other if program.result == name else program.result))
        for part in expression.split(" + ") if " + " in expression else ():
            found.append(
                replace(program, lines=[*program.lines[:number], f"{name} = {part}", *program.lines[number + 1 :]])
            )
    return found
