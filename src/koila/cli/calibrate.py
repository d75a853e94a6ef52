"""`koila calibrate`: how fast the machine at hand is.

*Takes* a device. *Gives* a file in the user's cache; plans that are compared by time follow it from then on.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from koila.calibrate import add_arguments, calibrate
from koila.errors import KoilaError

EXAMPLES = """\
examples:
  koila calibrate                  measure the CPU, with the threads that PyTorch uses
  koila calibrate --device cuda    measure an accelerator

Only the choice between plans depends on it: never whether one fits, nor any number."""


def add_to(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "calibrate", help="measure how fast this machine is", epilog=EXAMPLES, allow_abbrev=False,
        description="Measure how fast this machine is, so that plans are chosen for it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    parser.set_defaults(command=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    if not _is_here(options.device):
        raise KoilaError(f"there is no device {options.device!r} to measure", hint="koila doctor lists what is here")
    return calibrate(options)


def _is_here(device: str) -> bool:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):  # PyTorch says it in many ways; a build without CUDA asserts.
        return False
    return True
