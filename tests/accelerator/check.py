"""`koila.selfcheck` on the simulated device: `python -m tests.accelerator.check [--size 4]`.

*Takes* the arguments of `koila.selfcheck`. *Gives* its report. The device has a gigabyte, so that it can be filled.
"""

from __future__ import annotations

import sys

import torch

from koila import selfcheck
from tests.accelerator import sim


def main(arguments: list[str]) -> int:
    """The command line."""
    torch.set_num_threads(1)
    sim.limit(1 << 30)
    return selfcheck.main(["--device", "sim", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
