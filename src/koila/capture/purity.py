"""Purity: whether the code of an `autograd.Function` may be run in a trace, and be run once for many steps.

*Takes* a Function and the arguments of a call. *Gives* the reason why the call must run on real tensors, or None.

Tracing runs a Function's Python once, and not again for the steps that follow, so its code must depend on nothing but
what it is given. That is shown here, not assumed: the bytecode of the Function is followed through every helper it
calls, and each name that it loads must be a constant, an operator of PyTorch, or a function that is pure itself. What
an argument may be is checked at each call: a tensor or a plain value. From these nothing else can be reached, as long
as the attributes that are read are those of tensors and plain values.

This is a proof, not a guess, so it is strict: code that is harmless but not understood runs on real tensors, which
costs memory and nothing else. `koila.pure` declares what cannot be shown.

Names that are read are watched. Functions and constants that were rebound are looked at again at the next call; a
constant that was rebound once is taken for what it is, a variable. If it is rebound while a call is pending, that call
is stale (Rule 5).
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from koila._torch.functions import (
    draws_random_numbers,
    is_pure_operator,
    known_impure,
    leads_to_operators,
    transparent_wrapper,
)
from koila.capture.bridge import Bridge
from koila.ir.infer import PLAIN

MARK = "__koila_purity__"
"""The attribute of a Function that holds its verdict: on the class itself, so that it lives as long as the class."""

BUILTINS = frozenset(
    {
        "abs", "all", "any", "dict", "divmod", "enumerate", "filter", "frozenset", "isinstance", "len", "list", "map",
        "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "sum", "tuple", "zip", "Ellipsis",
        "NotImplemented",
    }
)  # fmt: skip
"""Functions of Python that neither read data nor change anything. `float(t)` and `str(t)` read a tensor's data, and
`type(t)` is another one in a trace."""
PURE_MODULES = (math.__name__, "_operator")
"""Modules written in C whose functions depend on their arguments alone."""
CLASSES = frozenset(
    {
        torch.Tensor, torch.Size, torch.device, torch.finfo, torch.iinfo, torch.no_grad, torch.enable_grad,
        torch.set_grad_enabled,
    }
)  # fmt: skip
"""Classes of PyTorch that may be used as values."""
VALUES = (torch.Tensor, torch.Size, torch.finfo, torch.device, torch.dtype, str, tuple, list, dict, set, slice, float)
"""What a Function can reach from its arguments; it may read the public attributes of these."""
STATE = {
    "item": "reads data", "tolist": "reads data", "numpy": "reads data", "data_ptr": "reads an address",
    "storage": "reads memory", "untyped_storage": "reads memory", "data": "writes past autograd",
    "grad": "reads gradients", "grad_fn": "reads autograd's graph", "backward": "writes gradients",
    "register_hook": "registers a hook", "retain_grad": "writes gradients", "requires_grad_": "makes a leaf",
    "register_post_accumulate_grad_hook": "registers a hook", "share_memory_": "moves memory",
    "is_shared": "reads where memory is", "is_pinned": "reads where memory is", "set_": "replaces memory",
    "resize_": "replaces memory", "detach_": "changes autograd's graph", "format": "reads data",
    "output_nr": "reads autograd's graph", "retains_grad": "reads autograd's graph",
}  # fmt: skip
"""Attributes of tensors and plain values that no trace can follow, with what they do."""
MUTATORS: dict[type, frozenset[str]] = {
    list: frozenset({"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "[]="}),
    dict: frozenset({"update", "setdefault", "popitem", "pop", "clear", "[]="}),
    set: frozenset({"add", "update", "discard", "remove", "pop", "clear"}),
}
"""What changes a container that the user may see: allowed on the Function's own, not where one is an argument."""


class NotShown(Exception):
    """The code is not known to be pure; the message says what it does."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A name that pure code reads, and what it stood for."""

    place: Any
    """A namespace, a cell, or the Function."""
    name: str
    seen: Any
    is_constant: bool

    def holds(self) -> bool:
        """Whether the name still stands for the same."""
        now = _look_up(self.place, self.name)
        return now is self.seen or (self.is_constant and type(now) is type(self.seen) and now == self.seen)


@dataclass(eq=False)
class Verdict:
    """What is known about a Function."""

    impure: str | None = None
    """Why it must run on real tensors; None: it may be traced."""
    is_declared: bool = False
    """Whether the user says so."""
    watched: tuple[_Watched, ...] = ()
    variables: frozenset[str] = frozenset()
    """Names that looked like constants and were rebound."""
    attributes: frozenset[str] = frozenset()
    """The attributes that its code reads; `[]=` if it assigns to items."""

    def rebound(self) -> str | None:
        """A name that stands for something else than when the code was followed; None: there is none."""
        return next((watched.name for watched in self.watched if not watched.holds()), None)

    def objection(self, arguments: Iterable[Any]) -> str | None:
        """Why a call with these arguments must run on real tensors; None: it may be traced."""
        if self.impure is not None or self.is_declared:
            return self.impure
        return next((text for argument in arguments if (text := self._object_to(argument)) is not None), None)

    def _object_to(self, argument: Any) -> str | None:
        kind = type(argument)
        if isinstance(argument, torch.Tensor):
            own = (torch.Tensor, torch.nn.Parameter, Bridge.lazy_type, Bridge.eager_type)
            return None if kind in own else f"it is given a {kind.__name__}"
        if kind in MUTATORS and self.attributes & MUTATORS[kind]:
            return f"it may change the {kind.__name__} that it is given"
        if kind in (tuple, list, set):
            return self.objection(argument)
        if kind is dict:
            return self.objection(argument.values())
        return None if isinstance(argument, PLAIN) else f"it is given a {kind.__name__}"


def verdict_on(function: type[torch.autograd.Function]) -> Verdict:
    """What is known about a Function; found out at its first call, and again if a name that it reads was rebound."""
    known: Verdict | None = vars(function).get(MARK)
    if known is not None and known.rebound() is None:
        return known
    variables: frozenset[str] = frozenset()
    if known is not None:
        rebound = {watched.name for watched in known.watched if watched.is_constant and not watched.holds()}
        variables = known.variables | rebound
    made = _judge(function, variables)
    setattr(function, MARK, made)
    return made


def declare_pure(function: Any) -> Any:
    """See `koila.pure`."""
    setattr(function, MARK, Verdict(is_declared=True))
    return function


def _judge(function: type[torch.autograd.Function], variables: frozenset[str]) -> Verdict:
    proof = _Proof(variables)
    try:
        proof.follow_function(function)
    except NotShown as shown:
        return Verdict(str(shown), variables=variables)
    return Verdict(None, False, tuple(proof.watched), variables, frozenset(proof.attributes))


@dataclass
class _Proof:
    """The code that was followed so far."""

    variables: frozenset[str]
    watched: list[_Watched] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    _followed: set[Any] = field(default_factory=set)

    def follow_function(self, function: type[torch.autograd.Function]) -> None:
        """All methods of a Function that PyTorch may call."""
        if function in self._followed:
            return
        self._followed.add(function)
        known: Verdict | None = vars(function).get(MARK)
        if known is not None and known.is_declared:
            return
        reason = known_impure(function)
        if reason is not None:
            raise NotShown(reason)
        has_setup = getattr(function, "setup_context", None) is not torch.autograd.Function.setup_context
        for name in ("forward", "setup_context", "backward", "vjp", "jvp"):
            method = getattr(function, name, None)
            if method is None or method is getattr(torch.autograd.Function, name, None):
                continue
            self.watched.append(_Watched(function, name, method, is_constant=False))
            takes_context = not (name == "forward" and has_setup)
            self._follow(method, f"{function.__name__}.{name}", takes_context)

    def _follow(self, code: Any, name: str, takes_context: bool = False) -> None:
        """One Python function, with all that it calls."""
        wrapped = transparent_wrapper(code)
        if wrapped is not None:
            return self._follow(wrapped, name, takes_context)
        if not isinstance(code, FunctionType):
            raise NotShown(f"{name} is a {type(code).__name__}, not a function")
        if code in self._followed:
            return None
        self._followed.add(code)
        for default in (*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values()):
            if default is not None and not _is_plain(default):
                raise NotShown(f"{name} has a default of type {type(default).__name__}")
        body = code.__code__
        context = body.co_varnames[0] if takes_context and body.co_argcount else None
        _Reading(self, code, name, context).read(body)
        return None

    # What names stand for.

    def judge(self, found: Any, place: Any, name: str, reader: str) -> None:
        """A name that is loaded must stand for something that never changes and does nothing else."""
        what = f"{reader} reads {name}"
        if _is_plain(found):
            self._judge_constant(found, place, name, what)
            return
        if not _is_of_torch(place):
            self.watched.append(_Watched(place, name, found, is_constant=False))
        if is_pure_operator(found) or (isinstance(found, type) and _is_allowed(found)):
            return
        if isinstance(found, FunctionType):
            self._follow(found, name)
        elif not isinstance(found, BuiltinFunctionType):
            raise NotShown(f"{what}, a {type(found).__name__}")
        elif found.__module__ not in PURE_MODULES:
            raise NotShown(f"{reader} calls {name}, which is not known to be pure")

    def _judge_constant(self, found: Any, place: Any, name: str, what: str) -> None:
        if _is_of_torch(place) or place is vars(math):
            return
        is_named_so = isinstance(place, CellType) or name.isupper()
        if not is_named_so or name in self.variables:
            raise NotShown(f"{what}, which may be rebound")
        self.watched.append(_Watched(place, name, found, is_constant=True))


@dataclass(frozen=True, slots=True)
class _Reading:
    """The bytecode of one Python function, with that of the functions inside it."""

    proof: _Proof
    function: FunctionType
    name: str
    context: str | None
    """The parameter that is autograd's context: whatever is stored there belongs to the call."""

    def read(self, code: CodeType) -> None:
        """Every instruction that reaches outside; all others work on what is there already."""
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("PUSH_NULL", "NOP", "RESUME")]
        index = 0
        while index < len(steps):
            index = self._read_one(steps, index)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.read(constant)

    def _read_one(self, steps: list[dis.Instruction], index: int) -> int:
        step = steps[index]
        name = step.opname
        if name == "LOAD_GLOBAL":
            return self._read_path(steps, index, *self._global(step.argval))
        if name in ("LOAD_DEREF", "LOAD_CLOSURE") and step.argval in self.function.__code__.co_freevars:
            cell = self._cell(step.argval)
            return self._read_path(steps, index, cell, _look_up(cell, step.argval))
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._read_attribute(step.argval, steps[index - 1] if index else None)
        elif name == "STORE_ATTR":
            if not self._is_context(steps[index - 1] if index else None):
                self._refuse(f"sets the attribute {step.argval}")
        elif name == "PUSH_EXC_INFO" and steps[index + 1].opname != "WITH_EXCEPT_START":
            self._refuse("catches exceptions, also those that a trace raises")
        elif name.startswith("FORMAT_") and not _is_raised(steps, index):
            self._refuse("makes a text, which may read data")
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            self.proof.attributes.add("[]=")
        elif name.startswith(("STORE_FAST", "DELETE_FAST", "STORE_DEREF")) and self.context in _names(step)[:1]:
            self._refuse(f"rebinds {self.context}")
        elif step.opcode in dis.hasfree:
            if name not in _OWN_CELLS or step.argval in self.function.__code__.co_freevars:
                self._refuse(f"rebinds {step.argval}, which is not its own")
        elif step.opcode in dis.hasname or name == "LOAD_BUILD_CLASS":
            self._refuse(f"does {name.replace('_', ' ').lower()} {step.argval or ''}".rstrip())
        return index + 1

    def _refuse(self, what: str) -> None:
        raise NotShown(f"{self.name} {what}")

    def _global(self, name: str) -> tuple[Any, Any]:
        namespace = self.function.__globals__
        if name in namespace:
            return namespace, namespace[name]
        found = getattr(builtins, name, None)
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        if name not in BUILTINS and not is_error:
            self._refuse(f"calls {name}")
        return None, None

    def _cell(self, name: str) -> CellType:
        code = self.function.__code__
        assert self.function.__closure__ is not None
        return self.function.__closure__[code.co_freevars.index(name)]

    def _read_path(self, steps: list[dis.Instruction], index: int, place: Any, found: Any) -> int:
        """A name, and the attributes that follow it as long as it stands for a module: `torch.nn.functional.gelu`."""
        name = str(steps[index].argval)
        index += 1
        if place is None:
            return index
        for step in steps[index:]:
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            if isinstance(found, type) and issubclass(found, torch.autograd.Function) and step.argval == "apply":
                self.proof.watched.append(_Watched(place, name, found, is_constant=False))
                self.proof.follow_function(found)
                return index + 1
            if not isinstance(found, ModuleType) and not leads_to_operators(found):
                break
            place, name = vars(found) if isinstance(found, ModuleType) else found, step.argval
            found = getattr(found, step.argval, None)
            index += 1
        self.proof.judge(found, place, name, self.name)
        return index

    def _read_attribute(self, name: str, before: dis.Instruction | None) -> None:
        if self._is_context(before):
            return
        if name in STATE:
            self._refuse(f"uses .{name}, which {STATE[name]}")
        if name.startswith("_") or not any(hasattr(kind, name) for kind in VALUES):
            self._refuse(f"reads .{name} of something that is no tensor")
        if draws_random_numbers(name):
            self._refuse(f"uses .{name}, which draws random numbers")
        method = getattr(torch.Tensor, name, None)
        if isinstance(method, FunctionType) and not _is_of_torch(method.__globals__):
            self._refuse(f"uses .{name}, which was added to torch.Tensor")
        self.proof.attributes.add(name)

    def _is_context(self, before: dis.Instruction | None) -> bool:
        """Whether the instruction before left autograd's context on top of the stack."""
        if self.context is None or before is None:
            return False
        is_load = "LOAD_FAST" in before.opname or before.opname == "LOAD_DEREF"
        return is_load and bool(_names(before)[-1] == self.context)


_OWN_CELLS = frozenset(
    {"MAKE_CELL", "LOAD_CLOSURE", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "COPY_FREE_VARS", "LOAD_FAST_AND_CLEAR"}
)
"""Instructions on variables that nested functions share."""


def _is_raised(steps: list[dis.Instruction], index: int) -> bool:
    """Whether a text is the message of an exception: nothing is stored or returned before that is raised."""
    for step in steps[index:]:
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(("STORE", "RETURN", "POP_", "YIELD")):
            return False
    return False


def _names(step: dis.Instruction) -> tuple[Any, ...]:
    """The variables of an instruction; newer Pythons load two in one."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _look_up(place: Any, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name)
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:  # Not filled yet.
            return None
    return getattr(place, name, None)


def _is_of_torch(place: Any) -> bool:
    return isinstance(place, dict) and str(place.get("__name__")).split(".")[0] == "torch"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) and value is not None


def _is_allowed(kind: type) -> bool:
    return kind in CLASSES or issubclass(kind, BaseException)
