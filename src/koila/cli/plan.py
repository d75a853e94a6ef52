"""`koila plan`: what would fit, and what it would cost in time, without training.

*Takes* a script, which is run up to its first backward pass. *Gives* the plan of that pass, and the curve of memory and
time over other budgets. The backward pass is not run; what the script did before it (files, downloads) is done.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from koila._api import explain_request
from koila.capture.bridge import Bridge
from koila.capture.gradients import BackwardRequest
from koila.cli import exits
from koila.cli.files import file_ending_in
from koila.cli.run import add_script_arguments, lazy_inputs, refused
from koila.cli.script import run_script
from koila.errors import BudgetError
from koila.execution.engine import request_of
from koila.interfaces import Realizer
from koila.ir.source import user_site
from koila.reporting.explain import Explanation

EXAMPLES = """\
examples:
  koila plan train.py                              how it would run now, and plans for smaller budgets
  koila plan --budget 2GiB train.py --epochs 3     how it would run inside 2 GiB
  koila plan --html plan.html train.py             the same as a page for a browser

The script is run up to its first backward pass, and ended there.

exit codes: 0; 1 if the script raises or ends before a backward pass; 2 for mistakes; 3 if the budget cannot be met"""


class Planned(BaseException):
    """The first backward pass was reached; no `except Exception` of the script stops it."""

    def __init__(self, place: str, explanation: Explanation) -> None:
        super().__init__(place)
        self.place, self.explanation = place, explanation


class _UpToBackward:
    """The realizer, which ends the script where it would run its first backward pass."""

    def __init__(self, realizer: Realizer) -> None:
        self._realizer = realizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._realizer, name)

    def backward(self, request: BackwardRequest) -> None:
        """Explain the pass instead of running it."""
        raise Planned(str(user_site()), explain_request(request))

    def backward_from(self, lazy: Any, retain_graph: bool) -> None:
        """The same, from one scalar."""
        self.backward(request_of(lazy._value, retain_graph))


@contextmanager
def _up_to_backward() -> Iterator[None]:
    realizer = Bridge.realizer
    Bridge.realizer = _UpToBackward(realizer)
    try:
        yield
    finally:
        Bridge.realizer = realizer


def add_to(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "plan", help="say what would fit, and what it would cost in time", epilog=EXAMPLES, allow_abbrev=False,
        description="Say how the first step of a script would run, and what other budgets would cost.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--html", type=file_ending_in(".html"), metavar="FILE", help="write a page for a browser, too")
    add_script_arguments(parser)
    parser.set_defaults(command=plan)


def plan(options: argparse.Namespace) -> int:
    """Run the script up to its first backward pass, and explain that."""
    with lazy_inputs(options), _up_to_backward():
        try:
            code = run_script(options.script, options.arguments, options.module)
        except BudgetError as refusal:
            print(refused(refusal, options), file=sys.stderr)
            return exits.REFUSED
        except Planned as found:
            print(f"backward() at {found.place} {found.explanation}")
            if options.html is not None:
                found.explanation.save(options.html)
            return exits.OK
    print("koila: the script ended before a backward pass of something lazy", file=sys.stderr)
    return code or exits.FAILED
