"""Code for prepared runs: each known program becomes flat Python functions of its own.

*Takes* the entries of a program that is about to run by what was prepared for it. *Gives* `RunCode`: functions that
look whether its inputs are as they were, say whose gradients a backward pass changes, and make its calls, with values
as variables that are deleted after their last use; and where each result lies.

Arguments that are no tensors are globals of the functions, not part of their text, so that all programs of the same
form share what Python made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch

from koila._scopes import Mark
from koila.capture.log import Entry
from koila.capture.template import BOUND, PENDING, Template
from koila.ir.cache import register
from koila.ir.draws import Supply

Place = tuple[int, int]
"""An entry, and a place among what it captured."""
_FILENAME = "<koila prepared run>"
MAX_CODES = 64
"""So many texts are remembered with what Python made of them; programs that run hold their own code."""


class _Codes:
    """What Python made of texts. It is no cache that counts: writing the code is the last part of preparing a run."""

    def __init__(self) -> None:
        self._entries: dict[str, CodeType] = {}
        register(self)

    def clear(self) -> None:
        self._entries.clear()

    def of(self, text: str) -> CodeType:
        """The code of a text."""
        found = self._entries.get(text)
        if found is None:
            if len(self._entries) >= MAX_CODES:
                self._entries.clear()
            found = self._entries[text] = compile(text, _FILENAME, "exec")
        return found


_codes = _Codes()


@dataclass(frozen=True, slots=True)
class Result:
    """Where a value that is bound after a run comes from, and in whose memory it lies."""

    entry: int
    index: int
    """Which result of the entry it is."""
    is_alone: bool
    """Whether its memory was made for it, and no other result lies there."""
    is_base: bool
    """Whether its memory was made for it."""
    is_view: bool
    root: int
    """The value, by number, for which the memory was made."""
    shared: Place | None
    """The input in whose memory it lies; None if it is a value's of the program."""
    family: Place | int | None
    """Which values of the same memory are views of one another: an input's family, a new one that begins with an entry,
    or none; see `Value.family`."""


@dataclass(frozen=True, eq=False, slots=True)
class RunCode:
    """The functions of a prepared run; each takes the entries of the program."""

    is_fresh: Callable[[Sequence[Entry]], bool]
    """Whether inputs have the budgets that they had, and are as they were when their calls were recorded (Rule 5)."""
    leaves: Callable[[Sequence[Entry]], dict[int, torch.Tensor]]
    """Inputs that are leaves and require grad, by identity."""
    made: Callable[[Sequence[Entry]], dict[int, torch.Tensor]]
    """Inputs that have a history, by identity."""
    has_made: bool
    """Whether there are any."""
    make_calls: Callable[[Sequence[Entry], Callable[[int, Exception], Any]], tuple[Any, ...]]
    """Makes the calls, and gives the needed values in order. A call that is not required and fails is handed, with the
    error, to the second argument, which gives what stands for its results."""
    results: tuple[Result, ...]
    """For each needed value what there is to know when it is bound."""
    recorded: dict[int, int]
    """By line of the text, the entry whose call stands there."""

    def failed_entry(self, traceback: TracebackType | None) -> int | None:
        """The entry whose call raised; None if the error was raised elsewhere."""
        code = self.make_calls.__code__
        while traceback is not None:
            if traceback.tb_frame.f_code is code:
                return self.recorded.get(traceback.tb_lineno)
            traceback = traceback.tb_next
        return None


class _Used:
    """Expressions for the things at some places; formatting a text asks for those that it needs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.places: set[int] = set()

    def __getitem__(self, place: int) -> str:
        self.places.add(place)
        return self._name.format(place)


class Writer:
    """Writes the code of one prepared run.

    Args:
        entries: A program like it, which is about to run.
        calls: The entries whose calls are made, in order, each with the values that nobody needs after it.
        needed: The values, by number, that are bound afterwards.
        required: Entries that must succeed.
        budgets: By input, the byte budget that it was given.
    """

    def __init__(
        self, entries: Sequence[Entry], calls: Sequence[tuple[int, Sequence[int]]], needed: Sequence[int],
        required: frozenset[int], budgets: dict[Place, int | None],
    ) -> None:  # fmt: skip
        self._entries, self._calls, self._needed = entries, calls, needed
        self._required, self._budgets = required, budgets
        self._templates: list[Template] = [entry.template for entry in entries]
        self._places = [(n, index) for n, each in enumerate(self._templates) for index in range(len(each.makers))]
        self._globals: dict[str, Any] = {"__name__": __name__, "Mark": Mark, "Supply": Supply}
        self._lines: list[str] = []
        self._recorded: dict[int, int] = {}

    def written(self) -> RunCode:
        """The functions."""
        self._write_freshness()
        has_made = self._write_inputs()
        self._write_calls()
        text = "\n".join(self._lines)
        names = self._globals
        exec(_codes.of(text), names)
        return RunCode(
            names["is_fresh"], names["leaves"], names["made"], has_made, names["make_calls"], self._results(),
            self._recorded,
        )  # fmt: skip

    # What is looked at before.

    def _write_freshness(self) -> None:
        self._lines.append("def is_fresh(entries):")
        for entry, _ in self._calls:
            tests = [
                test for kind, place in self._templates[entry].operands for test in self._tests(entry, kind, place)
            ]
            if tests:
                names = "".join(f"g{place}, " for place in range(len(self._entries[entry].captured)))
                self._lines += [
                    f"    {names} = entries[{entry}].captured",
                    f"    if not ({' and '.join(tests)}): return False",
                ]
        self._lines.append("    return True")

    def _tests(self, entry: int, kind: int, place: int) -> Iterable[str]:
        if kind == BOUND:
            yield self._budget_test(entry, place)
            place += 1
        if kind != PENDING:
            yield f"g{place}._version == g{place + 1}"
            yield f"g{place}.data_ptr() == g{place + 2}"
            yield f"g{place}.requires_grad is g{place + 3}"

    def _budget_test(self, entry: int, place: int) -> str:
        budget = self._budgets[entry, place]
        if budget is None:
            return f"g{place}.budget is None"
        self._globals[f"b{entry}_{place}"] = budget
        return f"g{place}.budget == b{entry}_{place}"

    def _write_inputs(self) -> bool:
        """Whether an input requires grad, and is a leaf, its call was matched by. Gives whether some are no leaves."""
        leaves, made = list[str](), list[str]()
        for entry, _ in self._calls:
            for kind, place in self._templates[entry].operands:
                if kind != PENDING:
                    real = place + (kind == BOUND)
                    tensor = self._entries[entry].captured[real]
                    if tensor.requires_grad:
                        (leaves if tensor.is_leaf else made).append(f"entries[{entry}].captured[{real}]")
        for name, found in (("leaves", leaves), ("made", made)):
            self._lines.append(f"def {name}(entries):")
            self._lines += [f"    t{number} = {tensor}" for number, tensor in enumerate(found)]
            pairs = ", ".join(f"id(t{number}): t{number}" for number in range(len(found)))
            self._lines.append(f"    return {{{pairs}}}")
        return bool(made)

    # The calls.

    def _write_calls(self) -> None:
        self._lines.append("def make_calls(entries, lost):")
        if any(self._entries[entry].draws for entry, _ in self._calls):
            self._lines.append("    mark = Mark()")
        for entry, dying in self._calls:
            self._write_call(entry)
            if dying:
                self._lines.append(f"    del {', '.join(f'v{number}' for number in dying)}")
        self._lines.append(f"    return ({''.join(f'v{number}, ' for number in self._needed)})")

    def _write_call(self, entry: int) -> None:
        template = self._templates[entry]
        constants, captured = _Used(f"c{entry}_{{}}"), _Used("g[{}]")
        operands = [f"v{position}" for position in template.positions]
        arguments = template.arguments.format(c=constants, g=captured, e=operands)
        self._globals[f"f{entry}"] = template.func
        self._globals.update({f"c{entry}_{place}": template.constants[place] for place in constants.places})
        if captured.places:
            self._lines.append(f"    g = entries[{entry}].captured")
        names = [f"v{template.first + index}" for index in range(len(template.makers))]
        call = f"f{entry}({arguments})"
        if names:
            call = f"{', '.join(names)}{',' if template.kind is not None else ''} = {call}"
        if self._entries[entry].draws:
            call = f"with Supply([draw.replayed() for draw in entries[{entry}].draws], mark): {call}"
        if entry in self._required:
            self._lines.append(f"    {call}")
            self._recorded[len(self._lines)] = entry
        else:
            failed = "".join(f"{name} = " for name in names)
            self._lines += ["    try:", f"        {call}", "    except Exception as error:"]
            self._lines.append(f"        {failed}lost({entry}, error)")

    # Where results lie.

    def _results(self) -> tuple[Result, ...]:
        found = [self._root(number) for number in self._needed]
        num_in = Counter(root for root, shared in found if shared is None)
        return tuple(
            self._result(number, root, shared, num_in[root])
            for number, (root, shared) in zip(self._needed, found, strict=True)
        )

    def _result(self, number: int, root: int, shared: Place | None, num_in_root: int) -> Result:
        is_base = shared is None and root == number
        return Result(
            *self._places[number], is_base and num_in_root == 1, is_base, self._output(number).is_view, root, shared,
            None if is_base else self._family(number),
        )  # fmt: skip

    def _output(self, number: int) -> Any:
        entry, index = self._places[number]
        return self._templates[entry].inference.outputs[index]

    def _shared(self, number: int) -> Place | int | None:
        """In whose memory a value lies: an input's, or another value's by number; None if it has its own."""
        entry, _ = self._places[number]
        template, output = self._templates[entry], self._output(number)
        if output.shares_output is not None:
            return template.first + int(output.shares_output)
        if output.shares is None:
            return None
        kind, place = template.operands[output.shares]
        return template.positions[output.shares] if kind == PENDING else (entry, place)

    def _root(self, number: int) -> tuple[int, Place | None]:
        shared = self._shared(number)
        while isinstance(shared, int):
            number, shared = shared, self._shared(shared)
        return number, shared

    def _family(self, number: int) -> Place | int | None:
        shared: Place | int | None = number
        while isinstance(shared, int):
            following = self._shared(shared)
            if following is not None and not self._output(shared).is_view:
                return self._places[shared][0]
            shared = following
        return shared
