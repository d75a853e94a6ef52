"""An audit of operators: the architectures of the conformance suite on the simulated device, and on the CPU.

    python -m tests.accelerator.audit [NAME ...]

*Takes* one training step of each architecture, dropout on, with CUDA's attention and cuDNN's batch normalisation.
*Gives* a line for each: whether it has eager's gradients in chunks of one sample, and whether it is cut as on the CPU
(as many runs in chunks, the same reasons for what runs whole, the same calls that run at once). Then every operator
that the device was asked for, forward and backward, by what koila does with it; one without a rule and without a reason
is wrong. Operators of devices that the simulated one lacks are in `test_operators.py`, from torch's schemas.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import koila
from koila._torch import RunMode, schema_of
from koila.analysis.decompositions import decompositions
from koila.analysis.rules import rule_for
from koila.ir.attention import OPERATORS as ATTENTION
from koila.ir.cache import clear_all
from koila.ir.draws import BY_LAYOUT
from tests.accelerator import sim
from tests.conformance.architectures import ARCHITECTURES
from tests.conformance.choice import cut_along
from tests.conformance.models import program_of
from tests.conformance.record import commit
from tests.conformance.trees import tensors_of
from tests.conformance.trial import Program, _lazy_inputs, counted, isolated
from tests.seeding import seed_present_devices_only

BATCH = 4
SHARE = 0.95
"""So many of the architectures must be cut as on the CPU."""
TOLERANCE, NARROW_TOLERANCE = 1e-9, 1e-5
"""Of gradients; programs that compute in float32 on the way have its tolerance."""
ZERO = 1e-4
"""Smaller gradients are measured by this share of the largest."""
FLOAT32 = ("autoformer",)
"""Architectures that eager itself refuses to run in float64."""

REASONS: dict[str, tuple[str, ...]] = {
    "made from nothing: a constant, or made again for each chunk": (
        "arange.default", "arange.start", "eye.default", "full.default", "new_empty.default",
        "new_empty_strided.default", "ones.default", "scalar_tensor.default", "zeros.default",
    ),
    "its result is a value of Python's, or its size depends on data: it runs at once": (
        "_is_all_true.default", "_local_scalar_dense.default", "_unique2.default", "masked_select.default",
        "nonzero.default",
    ),
    "where an element goes depends on the data of the samples before it": (
        "masked_scatter.default", "masked_scatter_backward.default",
    ),
    "its results depend on lengths that are data": ("_ctc_loss.Tensor", "_ctc_loss_backward.Tensor"),
    "of weights alone: there is no batch in it": (
        "_weight_norm_interface.default", "_weight_norm_interface_backward.default",
    ),
    "it names memory, not samples": ("as_strided.default", "as_strided_.default"),
    "random numbers that depend on data": ("multinomial.default",),
}  # fmt: skip
"""Why operators have no rule."""


class _Watch(RunMode):
    """Notes the operators that are called, and whether one of them makes float32 out of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()
        self.is_narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        result = func(*args, **(kwargs or {}))
        self.is_narrow |= any(each.dtype == torch.float32 and each.ndim for each in tensors_of(result))
        return result


@dataclass(frozen=True)
class Cut:
    """How a step in chunks of one sample ran."""

    num_split: int
    """Runs in chunks."""
    whole: tuple[str, ...]
    """Why runs were not cut."""
    at_once: tuple[str, ...]
    """Why calls ran at once instead of being recorded."""
    gradients: list[torch.Tensor] = field(repr=False, compare=False)

    def __str__(self) -> str:
        reasons = [*(f"whole: {reason}" for reason in self.whole), *(f"at once: {reason}" for reason in self.at_once)]
        return "; ".join([f"{self.num_split} runs in chunks", *reasons])


@dataclass(frozen=True)
class Row:
    """One architecture."""

    name: str
    on_cpu: Cut
    on_device: Cut
    distance: float
    """Of the gradients in chunks from eager's, both on the device: the largest relative one."""
    tolerance: float
    operators: frozenset[Any] = field(repr=False)

    @property
    def is_cut_alike(self) -> bool:
        return bool(self.on_device.num_split) and self.on_cpu == self.on_device

    @property
    def is_exact(self) -> bool:
        return self.distance <= self.tolerance

    def __str__(self) -> str:
        alike = "as on the CPU" if self.is_cut_alike else f"NOT as on the CPU, which has {self.on_cpu}"
        exact = "" if self.is_exact else ", WRONG"
        return f"{self.name:24s} {self.distance:.0e} from eager{exact}; {alike}; {self.on_device}"


def _program(name: str, device: str) -> Program:
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    made = program_of(ARCHITECTURES[name], dtype, BATCH, device)
    torch.manual_seed(11)
    return made


def _gradients(program: Program) -> list[torch.Tensor]:
    return [each.grad.cpu() for each in program.state.values() if each.grad is not None]


def _step(program: Program, inputs: Any) -> None:
    assert program.loss is not None
    program.loss(program.call(inputs)).backward()


def _in_chunks(name: str, device: str) -> Cut:
    program = _program(name, device)
    _, batches = cut_along(tensors_of(program.inputs), 0, BATCH)
    with isolated(), koila.budget(chunk_size=1):
        _step(program, _lazy_inputs(program.inputs, batches))
        koila.settle()
        reasons = [tuple(sorted(counted(kind))) for kind in ("fallback", "eager_because")]
        return Cut(koila.metrics.counter_value("runs::split"), *reasons, _gradients(program))


def _distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative distance; gradients that are nothing but rounding are measured by the largest one."""
    least = ZERO * max(each.norm().item() for each in expected)
    pairs = zip(found, expected, strict=True)
    return max(((a - b).norm() / max(b.norm().item(), least)).item() for a, b in pairs)


def audited(name: str) -> Row:
    """One architecture, on the CPU and on the device."""
    clear_all()
    on_cpu = _in_chunks(name, "cpu")
    with sim.attention(2), sim.cudnn_norm():
        clear_all()
        program = _program(name, "sim")
        with _Watch() as watch:
            _step(program, program.inputs)
        on_device = _in_chunks(name, "sim")
    distance = _distance(on_device.gradients, _gradients(program))
    return Row(name, on_cpu, on_device, distance, NARROW_TOLERANCE if watch.is_narrow else TOLERANCE,
               frozenset(watch.seen))  # fmt: skip


def standing(operator: Any) -> str | None:
    """What koila does with an operator; None if nobody has thought of it."""
    plain = _functional(operator)
    if operator in ATTENTION or plain in decompositions():
        return "taken apart where it is cut" if operator not in ATTENTION else "rule; with dropout taken apart"
    if rule_for(plain) is not None:
        return "rule"
    if operator in BY_LAYOUT:
        return "random numbers: drawn once, whole"
    name = str(operator).removeprefix("aten.")
    return next((reason for reason, names in REASONS.items() if name in names), None)


def _functional(operator: Any) -> Any:
    """The form of an operator that does not write: what a traced program has."""
    if not schema_of(operator).is_mutable:
        return operator
    packet = getattr(torch.ops.aten, operator.overloadpacket.__name__.removesuffix("_"), None)
    return getattr(packet, operator._overloadname, operator)


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of an audit."""
    alike, exact = (sum(getattr(row, name) for row in rows) for name in ("is_cut_alike", "is_exact"))
    yield from map(str, rows)
    yield f"\n{alike} of {len(rows)} architectures are cut as on the CPU, {exact} have eager's gradients"
    seen = {operator for row in rows for operator in row.operators}
    by_standing: dict[str, list[str]] = {}
    for operator in sorted(seen, key=str):
        by_standing.setdefault(standing(operator) or "NO RULE AND NO REASON", []).append(str(operator))
    yield f"\n{len(seen)} operators were seen on the device"
    for title, names in by_standing.items():
        yield f"  {title} ({len(names)}): {', '.join(name.removeprefix('aten.') for name in names)}"


def is_passed(rows: Sequence[Row]) -> bool:
    """Whether the audit finds nothing to mend."""
    alike = sum(row.is_cut_alike for row in rows)
    operators = {operator for row in rows for operator in row.operators}
    return alike >= SHARE * len(rows) and all(row.is_exact for row in rows) and None not in map(standing, operators)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.accelerator.audit")
    parser.add_argument("names", nargs="*", choices=[*ARCHITECTURES, []], help="some architectures instead of all")
    names = parser.parse_args().names or list(ARCHITECTURES)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_present_devices_only()
    print(f"commit {commit()}", flush=True)
    rows = []
    for name in names:
        rows.append(audited(name))
        print(name, file=sys.stderr, flush=True)
    print("\n".join(report(rows)))
    return 0 if is_passed(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
