"""Running at once: a step that was recorded before, and is small, is followed call by call while PyTorch runs it.

*Takes* the tensors and the place of a call of `koila.lazy(..., eager="auto")`, and afterwards the calls of the step.
*Gives* whether the step runs at once, and where in the known program it stands.

A step begins with such a call and ends with the next one. At first it is *watched*: its tensors are lazy, and each
recorded call is noted in a tree (`koila.capture.known`). When a step brought nothing new, the next one from the same
place with tensors of the same shapes is *followed*: its tensors are `EagerTensor`s, whose calls run at once as long as
they are those of the tree. The first call that is not ends this: it is recorded, like all after it, and watched.
A program that went astray must be watched for longer each time before it is followed again.

Each thread knows programs of its own. A part of a step ends where the recorded program would have been run (a value is
read, a backward pass): what follows starts at the root of the tree again, so that a closure which is called many
times in one step is known, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe
from typing import Any

import torch

from koila import events
from koila._torch.dynamo import in_compiled_code
from koila._torch.transforms import active_transform
from koila.capture.bridge import Bridge
from koila.capture.known import Form, KnownCall, Origin, Unknowable, tensors_in
from koila.capture.lookup import implementation
from koila.capture.pending import recorder
from koila.capture.record import may_write
from koila.ir.ambient import current_context
from koila.ir.cache import register
from koila.ir.failures import is_out_of_memory
from koila.ir.generators import GeneratorState
from koila.ir.source import Site, user_frame, user_site
from koila.ir.tree import leaves

MAX_PROGRAMS = 64
"""So many are known to a thread: places of `koila.lazy`, with each combination of shapes that comes there."""
MAX_CALLS = 20_000
"""A program with more calls in all its forms is not followed."""
ASK_EVERY = 16
"""Whether the environment names a budget is looked up in the first of so many followed steps."""
MAX_PATIENCE = 64
"""So many steps are watched at most before a program that went astray is followed again."""

_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "grad")
questions: set[Any] = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES}
"""Functions that record nothing and write nothing: these attributes, which lazy tensors answer themselves, and those
that were seen to give no tensor."""


class Program:
    """What is known about the steps that begin at one place with tensors of one layout."""

    def __init__(self, site: Site, batch: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.site, self.batch = site, batch
        self.inputs = tuple(map(Origin.of, tensors))
        self._layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        self.root = KnownCall()
        self.num_calls = 0
        self.patience = 1
        """So many steps without news are still to be watched before one is followed."""
        self.num_astray = 0
        """How often a step that was followed made a call that was not known."""
        self.rough_bytes = 0
        """More than a step may need: all that it makes, twice, and its gradients."""
        self.is_out = False
        """Whether it is never followed."""
        self.num_followed = 0

    @property
    def is_known(self) -> bool:
        """Whether its steps may be followed, as far as the program itself has a say."""
        return self.patience == 0 and not self.is_out

    def begins_with(self, tensors: Sequence[torch.Tensor], batch: Any) -> bool:
        """Whether its steps begin with tensors like these."""
        layouts = self._layouts
        if len(layouts) != len(tensors) or self.batch != batch:
            return False
        for tensor, (shape, stride, dtype, device) in zip(tensors, layouts, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.stride() != stride:
                return False
            if tensor.requires_grad or tensor.device != device:
                return False
        return True

    def went_astray(self) -> None:
        """A step that was followed made another call."""
        self.num_astray += 1
        self.patience = min(1 << self.num_astray, MAX_PATIENCE)


class Position:
    """Where a thread stands in its step."""

    __slots__ = ("at", "epoch", "gradient_bytes", "has_news", "has_recorded", "is_lazy", "made_bytes", "part",
                 "program", "saved", "seen", "watches")  # fmt: skip

    def __init__(self) -> None:
        self.at: KnownCall | None = None
        """The last call of a step that is followed; None if none is."""
        self.seen: KnownCall | None = None
        """The last call of a step that is watched."""
        self.watches = False
        """Whether recorded calls are noted."""
        self.is_lazy = False
        """Whether calls on results of followed steps are recorded: this step is not followed, or not any more."""
        self.program: Program | None = None
        self.part: object = None
        """Stands for the part of the step since something was run."""
        self.epoch = 0
        """The program of the log in which the last noted call was recorded."""
        self.has_news = False
        self.has_recorded = True
        """Whether something may have been recorded since values that a loop carries were run last."""
        self.made_bytes = 0
        self.gradient_bytes: dict[int, int] = {}
        """Bytes of the parameters that were used, by identity."""
        self.saved: dict[Any, Callable[[], None]] = {}
        """What the followed calls of this part changed: functions that change it back, for when memory runs out."""

    # Steps.

    def begin(self, program: Program | None) -> None:
        """A step begins that is watched; without a program nobody looks at it."""
        self.end()
        self.program, self.part, self.at, self.is_lazy = program, object(), None, True
        self.watches, self.epoch, self.has_recorded = program is not None, recorder.place.log.epoch, True
        self.seen = None if program is None else program.root
        self.has_news, self.made_bytes, self.gradient_bytes = False, 0, {}

    def follow(self, program: Program) -> None:
        """A step begins that is followed."""
        program.num_followed += 1
        self.program, self.part, self.at, self.is_lazy, self.watches = program, object(), program.root, False, False
        self.saved = {}

    def end(self) -> None:
        """The step has ended."""
        program, self.program = self.program, None
        if program is None:
            return
        if self.at is not None:
            events.count("at once::steps")
        elif self.watches:
            events.count("at once::steps watched")
            needed = 2 * self.made_bytes + sum(self.gradient_bytes.values())
            program.rough_bytes = max(program.rough_bytes, needed)
            if not self.has_news and program.patience:
                program.patience -= 1

    def rewind(self) -> None:
        """What was pending has been run, or would have been: what comes next is the beginning of a program."""
        self.part, self.saved = object(), {}
        if self.program is not None:
            if self.at is not None:
                self.at = self.program.root
            else:
                self.seen = self.program.root

    def go_astray(self, what: str) -> None:
        """A call that is not known, from here on calls are recorded; counted, with the place (Rule 6)."""
        if self.at is None or self.program is None:
            return
        events.count(f"at once::went lazy::{what}", site=user_site())
        self.program.went_astray()
        self.at, self.seen = None, self.at
        self.epoch, self.watches, self.is_lazy, self.has_news = recorder.place.log.epoch, True, True, True
        self.has_recorded = True

    def fail(self, error: BaseException, where: str) -> None:
        """A call of a step that is followed raised an error; if memory has run out, buffers and generators are again
        as they were when this part of the step began (Rule 4)."""
        if self.at is not None and is_out_of_memory(error):
            for restore in self.saved.values():
                restore()
        self.saved = {}
        self.go_astray(f"an error in {where}")

    # Watching.

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, ends_run: bool) -> None:
        """A call was recorded, or run because it had to be."""
        if type(implementation(func)) is not partial:
            if func is torch.Tensor.requires_grad_ and self.program is not None:
                self.program.is_out = True  # It is asked of the user's own tensor.
            return
        if recorder.is_hidden_from_dynamo and in_compiled_code() and self.program is not None:
            self.program.is_out = True  # Dynamo would look into each call.
        found = list(tensors_in(result))
        if not found and not may_write(func, kwargs or {}):
            questions.add(func)
        elif active_transform() is None and self.program is not None and self.seen is not None:
            self._learn(self.program, self.seen, (func, args, kwargs), found, ends_run)

    def _learn(
        self, program: Program, seen: KnownCall, call: tuple[Any, Any, Any], found: list[Any], ends_run: bool
    ) -> None:  # fmt: skip
        func, args, kwargs = call
        operands = [leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        fresh = [each for each in found if type(each) is Bridge.lazy_type and all(each is not o for o in operands)]
        origins = [Origin.of(lazy) for lazy in fresh]
        for origin in origins:
            origin.batch = _batch_like(origin.shape, operands)
        try:
            self.seen, is_new = seen.learn(func, Form(args, kwargs), Bridge.eager_type, origins, ends_run)
        except Unknowable:
            events.count("at once::a call that cannot be recognised", site=user_site())
            program.is_out = True
            return
        if self.seen.recorded is None:
            self.seen.recorded = func, current_context(), user_site()
            _save_before(self.seen, operands, fresh)
        program.num_calls += is_new
        program.is_out = program.is_out or program.num_calls > MAX_CALLS
        self.has_news = self.has_news or is_new
        for lazy, origin in zip(fresh, self.seen.results, strict=True):
            lazy._origin, origin.part = origin, self.part
            self.made_bytes += lazy.numel() * lazy.dtype.itemsize
        used = (each for each in operands if type(each) is not Bridge.lazy_type and each.requires_grad)
        self.gradient_bytes.update({id(each): each.numel() * each.dtype.itemsize for each in used})
        if ends_run:
            self.rewind()


class _Here(threading.local):
    """What a thread knows, and where it stands."""

    def __init__(self) -> None:
        self.position = Position()
        self.programs: OrderedDict[tuple[int, int], list[Program]] = OrderedDict()
        register(self)

    def clear(self) -> None:
        """Forget every program of the calling thread."""
        self.programs.clear()
        self.position = Position()


here = _Here()


def watch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Let a lazy call be recorded, and note it."""
    position, log = here.position, recorder.place.log
    epoch = log.epoch
    if epoch != position.epoch:
        position.rewind()
    position.watches = False
    try:
        result = Bridge.lazy_type.__torch_function__(func, types, args, kwargs)
    finally:
        position.watches = position.program is not None
    position.epoch = log.epoch
    position.note(func, args, kwargs, result, log.epoch != epoch)
    return result


def begin_step(tensors: Sequence[torch.Tensor], batch: Any, is_small: Callable[[int, bool], bool]) -> Program | None:
    """A step begins from these tensors; its program if it is followed.

    Args:
        tensors: Real tensors, in the order in which they are handed out.
        batch: What `koila.lazy` was told of their batch.
        is_small: Whether a program that may need so many bytes is far below what is free, and nobody asks for a budget;
            asked thoroughly or not.
    """
    frame = user_frame(_getframe(2))
    key = (id(frame.f_code), frame.f_lasti)
    position = here.position
    position.end()
    for program in here.programs.get(key, ()):
        if program.begins_with(tensors, batch):
            break
    else:
        made = _add_program(key, Site(frame.f_code, frame.f_lasti), batch, tensors)
        position.begin(made)
        return None
    if program.is_known and is_small(program.rough_bytes, program.num_followed % ASK_EVERY == 0):
        position.follow(program)
        return program
    position.begin(program)
    return None


def begin_other_step() -> None:
    """Tensors are made lazy by a call that does not ask for this: whatever comes next is recorded."""
    position = here.position
    if position.program is not None or not position.is_lazy:
        position.begin(None)


def trace_inputs(lazies: Sequence[Any]) -> None:
    """The lazy tensors that a watched step begins with."""
    program = here.position.program
    if program is not None and here.position.watches:
        for lazy, origin in zip(lazies, program.inputs, strict=True):
            lazy._origin = origin
            origin.batch = lazy._value.batch


def _save_before(call: KnownCall, operands: Sequence[Any], fresh: Sequence[Any]) -> None:
    """Let a call that draws random numbers, or writes to a buffer, note before it is made what it changes."""
    node = fresh[0]._value.node if fresh else None
    if node is None:
        return
    hidden = [node.operands[index] for index in node.inference.hidden_writes]
    written = [place for place, each in enumerate(operands) if any(each is real for real in hidden)]
    devices = {each.device for each in fresh} if node.inference.draws else set()
    if not (written or devices):
        return

    def save(args: Any, kwargs: Any) -> bool:
        saved = here.position.saved
        for device in devices:
            if device not in saved:
                state = GeneratorState(device)
                saved[device] = partial(state.write, state.read())
        if written:
            tensors = [leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
            for tensor in (tensors[place] for place in written):
                if id(tensor) not in saved:
                    saved[id(tensor)] = partial(_write, tensor, tensor.detach().clone())
        return True

    call.prepare_with(save, Bridge.eager_type)


def _write(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(before)


def _batch_like(shape: torch.Size, operands: Sequence[Any]) -> int | None:
    """Where the batch of a result may be: a dimension in which it is as long as an operand is in its batch."""
    for operand in operands:
        origin = getattr(operand, "_origin", None)
        if origin is None or origin.batch is None or len(shape) <= origin.batch:
            continue
        if shape[origin.batch] == origin.shape[origin.batch]:
            return int(origin.batch)
    return None


def _add_program(
    key: tuple[int, int], site: Site, batch: Any, tensors: Sequence[torch.Tensor]
) -> Program | None:  # fmt: skip
    """A program that begins at a place with these tensors; none if their gradients are asked for: they are the user's
    own, and others would be handed out."""
    if any(tensor.requires_grad for tensor in tensors):
        return None
    programs = here.programs
    if key not in programs and len(programs) >= MAX_PROGRAMS:
        programs.popitem(last=False)
    found = programs.setdefault(key, [])
    found[: -MAX_PROGRAMS + 1] = []
    found.append(Program(site, batch, tensors))
    return found[-1]
