"""`koila`: reads what was typed, and calls the command.

*Takes* the arguments. *Gives* an exit code. A mistake in what was typed is a sentence on stderr, never a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from koila import __version__
from koila.cli import calibrate, doctor, exits, plan, report, run
from koila.cli.script import NoScript
from koila.errors import KoilaError

DESCRIPTION = """\
koila runs a PyTorch program inside a byte budget, with the numbers of the whole batch."""
EPILOG = """\
examples:
  koila run --budget 2GiB train.py --epochs 3   run an unmodified script inside 2 GiB
  koila plan train.py                           what would fit, and what it would cost in time
  koila report run.json                         what a saved run did
  koila doctor                                  is everything here, and what is missing for what
  koila calibrate                               how fast is this machine

koila COMMAND --help has more."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        "koila", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"koila {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (run, plan, report, doctor, calibrate):
        command.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; `arguments` are those of the process if not given."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "command"):
        parser.print_help()
        return exits.USAGE
    try:
        code: int = options.command(options)
        return code
    except (NoScript, KoilaError, OSError) as error:
        print(f"koila: {error}", file=sys.stderr)
        return exits.USAGE


if __name__ == "__main__":
    sys.exit(main())
