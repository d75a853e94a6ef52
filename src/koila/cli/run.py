"""`koila run`: an unmodified script inside a byte budget.

*Takes* the script, its arguments, and the budget. *Gives* the script's exit code, or that of a refusal; on stderr what
was made lazy, and at the end what was run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from koila._api import last_report, reports
from koila._budget import budget, literal, read_bytes
from koila._bytes import format_bytes
from koila.cli import exits
from koila.cli.files import file_ending_in
from koila.cli.inputs import LazyInputs
from koila.cli.script import run_script
from koila.errors import BudgetError, compose_message
from koila.reporting import metrics
from koila.reporting.report import Report

EXAMPLES = """\
examples:
  koila run --budget 2GiB train.py --epochs 3      keep each step inside 2 GiB
  koila run --budget 0.5 train.py                  inside half of what is free now
  koila run train.py                               inside what is free now
  koila run --batch 1 --budget 512MiB train.py     the batch is dimension 1 (time first)
  koila run --offload --budget 1GiB train.py       values that do not fit wait in files
  koila run --budget 1GiB -m project.train         a module, as with python -m

What a DataLoader yields in the main process is made lazy; without a DataLoader, what is passed to the
outermost module in train mode. The script itself is not changed, and gets its own arguments.

exit codes:
  the script's own; 1 if it raises; 2 if the command cannot be understood; 3 if the budget cannot be met"""


def add_to(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "run", help="run a script inside a byte budget", description="Run an unmodified script inside a byte budget.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "--report", type=file_ending_in(".json", ".html"), metavar="FILE",
        help="save what the largest step did: as .json for `koila report`, or as .html for a browser",
    )  # fmt: skip
    add_script_arguments(parser)
    parser.set_defaults(command=run)


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that runs a script."""
    parser.add_argument(
        "--budget", type=literal, metavar="SIZE",
        help="what a step may allocate: 512MiB, 2GB, or a share of what is free such as 0.5",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=0, metavar="DIM", help="the dimension of the batch (default: 0)")
    parser.add_argument(
        "--offload", nargs="?", const=True, metavar="FOLDER", help="let values wait in files of this folder"
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing of koila's own on stderr")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="what follows is the name of a module, as with python -m"
    )
    parser.add_argument("script", help="the Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


@contextmanager
def lazy_inputs(options: argparse.Namespace) -> Iterator[LazyInputs]:
    """Inside this block a script gets lazy inputs, with the budget that the options name.

    Raises:
        BudgetError: It is not one.
    """
    allowed = None if options.budget is None else read_bytes(options.budget, "--budget", quoted=False)
    inputs = LazyInputs(options.batch, allowed, speaker(options))
    # The inputs carry the budget into other threads, where the scope is not in force.
    with budget(allowed, offload=options.offload), inputs.in_force():
        yield inputs


def speaker(options: argparse.Namespace) -> Callable[[str], None]:
    """How the command talks to the person: on stderr, or not at all."""
    if options.quiet:
        return lambda text: None
    return lambda text: print(f"koila: {text}", file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Run the script."""
    with lazy_inputs(options) as inputs:
        try:
            code = run_script(options.script, options.arguments, options.module)
        except BudgetError as refusal:
            print(refused(refusal, options), file=sys.stderr)
            return exits.REFUSED
        except SystemExit:
            _conclude(inputs, options)
            raise
        if code == exits.OK or not inputs.is_idle:
            _conclude(inputs, options)
    return code


def _conclude(inputs: LazyInputs, options: argparse.Namespace) -> None:
    speaker(options)(_summary(inputs))
    if options.report is not None:
        _largest().save(options.report)


def _largest() -> Report:
    """The latest of the steps that needed most: not the reading of an accuracy after it."""
    return max(reversed(reports()), key=lambda report: report.projected_bytes or 0, default=last_report())


def refused(refusal: BudgetError, options: argparse.Namespace) -> str:
    """A refusal as the error has it, with what to type instead of what to write."""
    hint = f"koila run {_typed(options, refusal.needed_bytes)}" if refusal.needed_bytes else refusal.hint
    return f"koila: {compose_message(refusal.fact, refusal.where, hint)}"


def _typed(options: argparse.Namespace, num_bytes: int) -> str:
    """What was typed, with another budget, which stands last: a script after a bare `--offload` would be its folder."""
    words = [*(["--batch", str(options.batch)] if options.batch else []), *(["-m"] if options.module else [])]
    if options.offload is not None:
        words.append("--offload" if options.offload is True else f"--offload={options.offload}")
    return shlex.join([*words, "--budget", str(num_bytes), options.script, *options.arguments])


def _summary(inputs: LazyInputs) -> str:
    if inputs.is_idle:
        return (
            "nothing was made lazy: the script read no DataLoader and called no module in train mode; "
            "koila.lazy(x, y) in the script does it by hand"
        )
    whole, split = (metrics.counter_value(f"runs::{how}") for how in ("whole", "split"))
    total = whole + split
    parts = [f"{total} run{'' if total == 1 else 's'}, {split} of them in chunks"]
    largest = _largest()
    if largest.projected_bytes:
        limit = "" if largest.allowed_bytes is None else f" of {format_bytes(largest.allowed_bytes)} allowed"
        parts.append(f"at most {format_bytes(largest.projected_bytes)} projected{limit}")
    fallbacks = sum(len(report.fallbacks) for report in reports())
    parts += [f"{fallbacks} ran whole although the budget asked for a cut"] if fallbacks else []
    return "; ".join(parts)
