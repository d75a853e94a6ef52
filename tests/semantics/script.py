"""A program in a process of its own: for what would end this one."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent


def run(source: str) -> str:
    """What a program prints; an error if it does not end well."""
    done = subprocess.run([sys.executable, "-c", dedent(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
