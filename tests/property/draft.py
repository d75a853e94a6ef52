"""A program that is being written: its text, its data, and what each value is so far.

*Takes* lines of PyTorch. *Gives* `Draft`, which tries each line on plain PyTorch, so that what eager refuses, what
overflows and what grows too large never becomes a line, and `Program`, the finished text and the tensors it reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from tests.property.environment import environment

MAX_NUMEL = 1500
MAX_ABS = 1e3


@dataclass
class Program:
    """A program and the data that it starts from; nothing in it knows koila."""

    seed: int
    batch: int
    inputs: dict[str, torch.Tensor]
    """Tensors that carry the batch in dimension 0: `x` floats, `y` labels, `t` tokens, `w` positive weights."""
    tensors: dict[str, torch.Tensor]
    """Parameters (`p…`, which require grad), constants (`c…`) and buffers (`r…`), as they are before the program."""
    lines: list[str]
    result: str
    """The name of the value that is asked for: a scalar for a loss."""
    held: tuple[str, ...]
    """Other values that the user holds and reads afterwards."""
    mode: str
    """`loss`: backward, then values; `read`: values, then backward; `output`: a tensor, then backward with a gradient;
    `inference`: a tensor under `no_grad`."""

    @property
    def text(self) -> str:
        """The program as a function."""
        names = ", ".join((*self.inputs, *self.tensors))
        body = "\n    ".join(self.lines)
        return f"def program({names}):\n    {body}\n    return [{', '.join((self.result, *self.held))}]\n"

    def __str__(self) -> str:
        data = [f"# seed {self.seed}, batch {self.batch}, mode {self.mode}"]
        for name, value in {**self.inputs, **self.tensors}.items():
            note = ", requires grad" if value.requires_grad else ""
            data.append(f"# {name}: {list(value.shape)} {str(value.dtype).removeprefix('torch.')}{note}")
        return "\n".join(data) + "\n" + self.text


class Refused(Exception):
    """A line that the program cannot have."""


@dataclass
class Draft:
    """A program that is being written."""

    random: Random
    batch: int
    generator: torch.Generator
    values: dict[str, Any] = field(default_factory=dict)
    """Everything that a line may read, computed eagerly."""
    starts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters, constants and buffers as they were made."""
    lines: list[str] = field(default_factory=list)
    count: int = 0

    # Choosing.

    def size(self) -> int:
        """A size other than the batch's; equal to it now and then."""
        return self.random.choice((1, 2, 3, 3, 4, 4, self.batch, self.batch))

    def names(self, wanted: Callable[[torch.Tensor], bool]) -> list[str]:
        tensors = {name: value for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        return [name for name, value in tensors.items() if name[0] in "vxytw" and is_usable(value) and wanted(value)]

    def pick(self, wanted: Callable[[torch.Tensor], bool] = lambda value: True) -> str:
        """A floating-point value; late ones are likelier, so that programs are deep."""
        found = self.names(lambda value: value.is_floating_point() and wanted(value))
        if not found:
            raise Refused
        weights = [(1 + position) ** 2 if name != "w" else 0.5 for position, name in enumerate(found)]
        return self.random.choices(found, weights)[0]

    def unread(self) -> list[str]:
        """Values that no line reads yet."""
        text = "\n".join(line.partition(" = ")[2] or line for line in self.lines)
        return [name for name in self.values if name[0] == "v" and not reads(text, name)]

    def pick_bool(self) -> str:
        found = self.names(lambda value: value.dtype == torch.bool)
        if found and self.random.random() < 0.6:
            return self.random.choice(found)
        source = self.pick()
        return self.assign(f"{source} > {self.random.choice((0.0, 0.1, -0.3))}")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        """A dimension, counted from the left or from the right."""
        ndim = self.values[name].ndim
        if ndim == 0:
            raise Refused
        return self.random.randrange(-ndim, ndim)

    def dims(self, name: str) -> list[int]:
        ndim = self.values[name].ndim
        if ndim == 0:
            raise Refused
        return sorted(self.random.sample(range(ndim), self.random.randint(1, ndim)))

    # Making.

    def add(self, prefix: str, tensor: torch.Tensor) -> str:
        """A parameter, constant or buffer."""
        name = f"{prefix}{len(self.starts)}"
        self.starts[name] = tensor
        self.values[name] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return name

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) * 0.5

    def parameter(self, *shape: int) -> str:
        return self.add("p", self.normal(shape).requires_grad_())

    def constant(self, *shape: int) -> str:
        return self.add("c", self.normal(shape))

    def tensor(self, *shape: int) -> str:
        return self.parameter(*shape) if self.random.random() < 0.6 else self.constant(*shape)

    def assign(self, expression: str) -> str:
        """A new value; Refused if eager refuses it, or if it is no value to go on with."""
        name = f"v{self.count}"
        self.execute(f"{name} = {expression}", name)
        self.count += 1
        return name

    def execute(self, line: str, *checked: str) -> None:
        """Append a line that works."""
        scope = dict(self.values)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(line, environment(), scope)
            for name in checked:
                check(scope[name])
        except Exception as error:
            raise Refused from error
        self.values = scope
        self.lines.append(line)

    def like(self, shape: tuple[int, ...]) -> str:
        """A tensor that broadcasts to a shape: another value, a parameter or a constant."""
        found = self.names(lambda value: value.is_floating_point() and broadcasts(tuple(value.shape), shape))
        if found and self.random.random() < 0.6:
            return self.random.choice(found)
        kept = shape[self.random.randint(0, len(shape)) :]
        return self.tensor(*(1 if self.random.random() < 0.3 else size for size in kept))


def check(value: Any) -> None:
    """Whether a program may go on with a value."""
    if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MAX_NUMEL or value.ndim > 5:
        raise Refused
    if value.dtype not in (torch.float64, torch.int64, torch.bool):
        raise Refused
    if value.is_floating_point() and not (value.isfinite().all() and value.abs().max() < MAX_ABS):
        raise Refused


def is_usable(value: torch.Tensor) -> bool:
    """Whether eager still accepts a value: one of several views is lost if their base is written to."""
    try:
        return value.is_leaf in (True, False)
    except RuntimeError:
        return False


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to exactly the target."""
    if len(shape) > len(target):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False))


def prune(program: Program) -> Program:
    """Without the tensors that no line reads."""
    text = "\n".join(program.lines)
    used = {name: value for name, value in program.tensors.items() if reads(text, name)}
    return Program(
        program.seed, program.batch, program.inputs, used, program.lines, program.result, program.held, program.mode
    )


def reads(text: str, name: str) -> bool:
    """Whether a name stands in a text."""
    words = "".join(character if character.isalnum() or character == "_" else " " for character in text).split()
    return name in words
