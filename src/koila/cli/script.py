"""A script, run as python would run it.

*Takes* a path, or the name of a module, and the script's own arguments. *Gives* its exit code; an exception of the
script is shown as python shows it, without a frame of koila's.

The script becomes the module `__main__`: what it pickles, and what worker processes import again, is the script and not
koila.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType, TracebackType

from koila.cli import exits
from koila.errors import BudgetError
from koila.execution.frames import wants_all_frames


class NoScript(Exception):
    """There is no script to run."""


def run_script(path: str, arguments: Sequence[str], is_module: bool = False) -> int:
    """Run a script with its arguments; `sys.exit` in it passes through.

    Args:
        path: The script; with `is_module` the name of a module, as after `python -m`.
        arguments: The script's own arguments.
        is_module: Whether it is a module.

    Returns:
        The exit code.

    Raises:
        NoScript: The file cannot be read.
        BudgetError: A run of the script was refused, and the script did not catch it.
    """
    act = _module(path, arguments) if is_module else _script(path, arguments)
    try:
        act()
    except (BudgetError, SystemExit):
        raise
    except Exception as error:
        _show(error)
        return exits.FAILED
    except KeyboardInterrupt as error:
        _show(error)
        return exits.INTERRUPTED
    return exits.OK


def _script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    source = _read(path)
    module = _become_main(path, arguments)
    return lambda: exec(_compiled(source, path), module.__dict__)


def _module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise NoScript(f"there is no module {name}")
    sys.argv = [name, *arguments]

    def run_module() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return run_module


def _read(path: str) -> bytes:
    if os.path.isdir(path):
        raise NoScript(f"{path} is a folder; name a file in it")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise NoScript(f"{path} cannot be read: {error.strerror}") from error


def _compiled(source: bytes, path: str) -> CodeType:
    return compile(source, os.path.abspath(path), "exec", dont_inherit=True)


def _become_main(path: str, arguments: Sequence[str]) -> ModuleType:
    """Everything that a script can see of how it was started."""
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(path)
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(module.__file__)
    return module


def _show(error: BaseException) -> None:
    if not wants_all_frames():
        _without_own_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _without_own_frames(error: BaseException) -> None:
    """Leave koila's frames out of the traceback of an exception, and of those that led to it."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = _foreign(each.__traceback__)
            waiting += (each.__cause__, each.__context__)


def _foreign(traceback: TracebackType | None) -> TracebackType | None:
    """The lines of a traceback that are not koila's; a line of `contextlib` belongs to the code that it stands in."""
    frames, is_own = [], False
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        is_own = module.split(".")[0] == "koila" or (is_own and module == "contextlib")
        if not is_own:
            frames.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    for each in reversed(frames):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
