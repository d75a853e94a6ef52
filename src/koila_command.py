"""The entry point of the command `koila`.

It is not inside the package `koila`, which cannot be imported without the PyTorch that it was made for: the command
then says what is missing, instead of showing a traceback.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command, and give its exit code."""
    try:
        from koila.cli.main import main as command
    except ImportError as error:
        hint = "" if "try:" in str(error) else "\n  try: pip install --force-reinstall koila"
        print(f"koila: {error}{hint}", file=sys.stderr)
        return 1
    return command()
