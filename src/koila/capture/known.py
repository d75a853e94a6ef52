"""Known calls: a program as a tree of calls, each with a function that recognises its arguments.

*Takes* the calls of programs that were recorded, with their results. *Gives* `KnownCall`: what follows it, by function;
whether the arguments of a call are its arguments; what its results are like. Nothing here holds a tensor.

A call is recognised by its function, by where its operands came from (the result of which call of the program), by the
shapes and dtypes of the other tensors, and by its other arguments. A number that was seen to vary while the results
stayed alike may be any number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from koila.ir.prepass import PLAIN_TYPES, is_plain
from koila.ir.tree import map_leaves

MAX_FORMS = 8
"""A function that follows a call has at most so many forms of arguments."""


class Origin:
    """What a result of a known call is like."""

    __slots__ = ("batch", "device", "dtype", "part", "requires_grad", "shape", "stride")

    def __init__(self, shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> None:
        self.shape, self.dtype, self.requires_grad = shape, dtype, requires_grad
        self.stride: tuple[int, ...] | None = None
        self.device: torch.device | None = None
        """Of it as it was seen first; None if nobody will ask."""
        self.batch: int | None = None
        """A dimension that may be the batch: it is as long as that of an input in its batch."""
        self.part: object = None
        """The part of a step in which it was made last."""

    @classmethod
    def of(cls, lazy: Any) -> Origin:
        """What a lazy tensor is like."""
        found = cls(torch.Size(lazy.shape), lazy.dtype, lazy.requires_grad)
        found.stride, found.device = lazy.stride(), lazy.device
        return found

    def is_like(self, other: Origin) -> bool:
        """Whether two results take the same memory, and have a gradient or not."""
        return (self.shape, self.dtype, self.requires_grad) == (other.shape, other.dtype, other.requires_grad)


class Seen:
    """A tensor among the arguments of a known call that is no result of the program: a parameter, a buffer, a mask."""

    __slots__ = ("batch", "device", "dtype", "is_pending", "reference", "requires_grad", "shape", "stride")

    def __init__(self, tensor: Any) -> None:
        self.reference = weakref.ref(tensor)
        self.shape, self.stride, self.dtype = torch.Size(tensor.shape), tensor.stride(), tensor.dtype
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        value = tensor._value if hasattr(tensor, "_held") else None
        self.is_pending = value is not None and value.real is None
        """Whether it was lazy, and made by a call that is not known: of an `autograd.Function` that is pure."""
        self.batch: int | None = None if value is None else value.batch


class Unknowable(Exception):
    """An argument that cannot be recognised."""


class Form:
    """What the arguments of a call are like: conditions on them, as text, and a key that is equal for equal ones."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        self.numbers: list[float] = []
        """The numbers among them, in order."""
        self._constants: dict[str, Any] = {"plain": PLAIN_TYPES, "Eager": None}
        self._key: list[Any] = []
        self._conditions: list[str | int] = []
        """An entry that is an int stands for: the number of this index is the one that was seen."""
        self._paths: list[str] = []
        self._names = [f"a{index}" for index in range(len(args))]
        """Of variables for the arguments."""
        self._key.append(len(args))
        for name, item in zip(self._names, args, strict=True):
            self._take(item, name)
        if kwargs:
            self._demand("kwargs", None)
            self._take(kwargs, "kwargs")
        else:
            self._demand("not kwargs", None)
        self.args, self.kwargs = map_leaves(args, _without_tensors), map_leaves(kwargs or {}, _without_tensors)
        """The arguments as they were seen, with an `Origin` or a `Seen` in place of each tensor."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for arguments that differ in numbers alone."""
        return tuple(self._key)

    def matcher(self, eager: type, varying: frozenset[int]) -> Callable[[Any, Any], bool]:
        """A function of `args` and `kwargs`; of numbers whose index is in `varying`, only the class is looked at."""
        conditions = [
            each if isinstance(each, str) else f"{self._paths[each]} == {self._constant(self.numbers[each])}"
            for each in self._conditions
            if isinstance(each, str) or each not in varying
        ]
        scope = {**self._constants, "Eager": eager}
        lines = [
            "def matches(args, kwargs):",
            f"    if len(args) != {len(self._names)}: return False",
            *([f"    {', '.join(self._names)}, = args"] if self._names else []),
            f"    return {' and '.join(conditions)}",
        ]
        exec("\n".join(lines), scope)
        found: Callable[[Any, Any], bool] = scope["matches"]
        return found

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _demand(self, condition: str, key: Any) -> None:
        self._conditions.append(condition)
        self._key.append(key)

    def _take(self, value: Any, path: str) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._take_tensor(value, path)
        elif kind is bool or value is None or value is ...:
            self._demand(f"{path} is {value!r}", value)
        elif kind is int or kind is float:
            self._demand(f"type({path}) is {kind.__name__}", kind)
            self._conditions.append(len(self.numbers))
            self.numbers.append(value)
            self._paths.append(path)
        elif kind in _COMPARED:
            self._demand(f"{path} == {self._constant(value)}", (kind, value))
        else:
            self._take_container(value, path)

    def _take_tensor(self, tensor: Any, path: str) -> None:
        origin = getattr(tensor, "_origin", None)
        if origin is not None:
            self._demand(f"type({path}) is Eager and {path}._origin is {self._constant(origin)}", id(origin))
            return
        if not hasattr(tensor, "_held") and not is_plain(tensor):
            raise Unknowable
        shape, dtype = torch.Size(tensor.shape), tensor.dtype
        looks = f"{path}.shape == {self._constant(shape)} and {path}.dtype is {self._constant(dtype)}"
        looks = f"type({path}) in plain and not {path}.is_nested and {looks}"
        if type(tensor) is torch.nn.Parameter:  # Mostly it is the same one.
            looks = f"({path} is {self._constant(weakref.ref(tensor))}() or {looks})"
        self._demand(looks, (shape, dtype))

    def _take_container(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind is slice:
            self._demand(f"type({path}) is slice", slice)
            for name in ("start", "stop", "step"):
                self._take(getattr(value, name), f"{path}.{name}")
        elif kind in (list, tuple, torch.Size):
            self._demand(f"type({path}) is {self._constant(kind)} and len({path}) == {len(value)}", (kind, len(value)))
            for index, item in enumerate(value):
                self._take(item, f"{path}[{index}]")
        elif kind is dict and all(type(name) is str for name in value):
            self._demand(f"{path}.keys() == {self._constant(set(value))}", (dict, tuple(value)))
            for name, item in value.items():
                self._take(item, f"{path}[{name!r}]")
        else:
            raise Unknowable


def _without_tensors(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    origin = getattr(leaf, "_origin", None)
    return Seen(leaf) if origin is None else origin


_COMPARED = (str, torch.dtype, torch.device, torch.memory_format, torch.layout)


class KnownCall:
    """A call of a program that was recorded before; the root of a program is one without arguments."""

    __slots__ = ("_key", "_varying", "before", "ends_run", "following", "form", "matches", "only", "prepare",
                 "recorded", "results")  # fmt: skip

    def __init__(self, form: Form | None = None, eager: type | None = None, before: KnownCall | None = None) -> None:
        self.following: dict[Any, tuple[KnownCall, ...]] = {}
        """What came after it, by function."""
        self.results: tuple[Origin, ...] = ()
        """Its new results, in order."""
        self.only: Origin | None = None
        """Its result, if there is one."""
        self.ends_run = False
        """Whether what was pending was run in it."""
        self.before = before
        """What it followed; None for the root."""
        self.recorded: Any = None
        """How it was recorded; see `koila.capture.again`."""
        self.prepare: Callable[[Any, Any], bool] | None = None
        """What is to be done with its arguments before it is made; True."""
        self.form, self._varying = form, frozenset[int]()
        self._key = () if form is None else form.key
        if form is not None and eager is not None:
            self.matches = self._matcher(form, eager)
            """Whether `args` and `kwargs` are its arguments."""

    def learn(
        self, func: Any, form: Form, eager: type, results: Sequence[Origin], ends_run: bool
    ) -> tuple[KnownCall, bool]:  # fmt: skip
        """The call that follows this one; and whether something new was learned about it."""
        forms = self.following.get(func, ())
        for call in forms:
            if call._key == form.key and call._is_alike(form, results):
                is_new = call._widen(form, eager) or call.ends_run != ends_run
                call.ends_run = ends_run
                return call, is_new
        call = KnownCall(form, eager, self)
        call.results, call.ends_run = tuple(results), ends_run
        call.only = call.results[0] if len(results) == 1 else None
        self.following[func] = (*forms[-MAX_FORMS + 1 :], call)
        return call, True

    def prepare_with(self, prepare: Callable[[Any, Any], bool], eager: type) -> None:
        """From now on something is done before it is made."""
        assert self.form is not None
        self.prepare = prepare
        self.matches = self._matcher(self.form, eager)

    def _matcher(self, form: Form, eager: type) -> Callable[[Any, Any], bool]:
        matches, prepare = form.matcher(eager, self._varying), self.prepare
        if prepare is None:
            return matches
        return lambda args, kwargs: matches(args, kwargs) and prepare(args, kwargs)

    def _is_alike(self, form: Form, results: Sequence[Origin]) -> bool:
        """Whether results are like the known ones."""
        if len(results) != len(self.results):
            return False
        return all(known.is_like(seen) for known, seen in zip(self.results, results, strict=True))

    def _widen(self, form: Form, eager: type) -> bool:
        """Let numbers that were different this time be any numbers; False if there are none."""
        assert self.form is not None
        pairs = enumerate(zip(self.form.numbers, form.numbers, strict=True))
        differing = frozenset(index for index, (known, seen) in pairs if known != seen) - self._varying
        if differing:
            self._varying |= differing
            self.matches = self._matcher(self.form, eager)
        return bool(differing)


def tensors_in(result: Any) -> Iterator[Any]:
    """The tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_in(item)
