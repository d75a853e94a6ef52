"""`koila report`: what a saved run did.

*Takes* a file that `koila run --report` or `Report.save` wrote. *Gives* its text, and its page for a browser.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from koila.cli import exits
from koila.cli.files import file_ending_in
from koila.reporting.report import Report

EXAMPLES = """\
examples:
  koila run --budget 2GiB --report run.json train.py     save what the largest step did
  koila report run.json                                  print it
  koila report --html run.html run.json                  the memory over time, as a page for a browser
  koila report --open run.json                           open that page now"""


def add_to(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "report", help="print a saved report, or show its page", description="Print what a saved run did.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--html", type=file_ending_in(".html"), metavar="FILE", help="write the page to this file")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("file", help="a report that was saved as .json")
    parser.set_defaults(command=report)


def report(options: argparse.Namespace) -> int:
    """Print a report."""
    try:
        found = Report.load(options.file)
    except OSError as error:
        print(f"koila: {options.file} cannot be read: {error.strerror}", file=sys.stderr)
        return exits.USAGE
    print(found)
    if options.html is not None or options.open:
        page = options.html or os.path.join(tempfile.mkdtemp(prefix="koila-"), "report.html")
        found.save(page)
        print(f"page: {page}")
        if options.open:
            webbrowser.open(Path(page).resolve().as_uri())
    return exits.OK
