"""Measures how fast the machine at hand is: `python -m koila.calibrate`, or with `--device cuda`.

*Takes* a device. *Gives* a file in the user's cache, which plans read from then on (`koila.planning.machine`): which of
two plans is the faster one depends on it, never whether one fits, nor any number. It takes some seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from koila.planning.machine import Speeds, calibration_file, save_speeds
from koila.planning.rates import BYTES, FLOPS

ROUNDS = 5


def best_seconds(device: torch.device, act: Callable[[], object], times: int) -> float:
    """The shortest time of one of so many calls in a row, of some rounds; the device has finished them."""
    found = float("inf")
    for _ in range(ROUNDS):
        _wait_for(device)
        started = time.perf_counter()
        for _ in range(times):
            act()
        _wait_for(device)
        found = min(found, (time.perf_counter() - started) / times)
    return found


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_speeds(device: torch.device, size: int = 1024) -> Speeds:
    """The speeds of a device, by an addition of nothing, an addition of much, and a product of `size` rows."""
    one = torch.ones(1, device=device)
    large = torch.ones(16 * size * size, device=device)
    factor = torch.ones(size, size, device=device)
    call = best_seconds(device, lambda: one.add_(1), 200)
    add = best_seconds(device, lambda: large.add_(1), 2) - call
    product = best_seconds(device, lambda: factor @ factor, 2) - call
    rate = 2 * large.numel() * large.element_size() / max(add, 1e-9)
    flops = 2 * size**3 / max(product, 1e-9)
    return Speeds(call, rate / BYTES["plain"], flops / FLOPS[""], torch.get_num_threads())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked for; `koila calibrate` has the same."""
    parser.add_argument("--device", default="cpu", help="the device to measure (default: cpu)")
    parser.add_argument("--file", type=Path, default=calibration_file(), help="where to write it")
    parser.add_argument("--size", type=int, default=1024, help="rows of the matrices that are multiplied")


def calibrate(options: argparse.Namespace) -> int:
    """Measure, write the file and say what is in it."""
    device = torch.device(options.device)
    speeds = measure_speeds(device, options.size)
    save_speeds({device.type: speeds}, options.file)
    print(f"{device}: {1e6 * speeds.call_seconds:.1f} µs per call, {speeds.byte_speed:.2f} times the nominal bytes, "
          f"{speeds.flop_speed:.2f} times the nominal products per second; {options.file}")  # fmt: skip
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Read the arguments, then `calibrate`."""
    parser = argparse.ArgumentParser(prog="python -m koila.calibrate", description=__doc__.splitlines()[0])
    add_arguments(parser)
    return calibrate(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
