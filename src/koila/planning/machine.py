"""The machine at hand: how fast its devices were when somebody measured them, from a file in the user's cache.

*Takes* a JSON file that `python -m koila.calibrate` has written. *Gives* the rows of `koila.planning.devices` with
these speeds. Without such a file the rows are those of a nominal machine. A file that is damaged, or that was measured
with another PyTorch or another number of threads, is not used, and that is counted. The same file gives the same plans.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from koila import events
from koila.planning.devices import DeviceRules, register_device, rules_for

VARIABLE = "KOILA_CALIBRATION"
"""The environment variable that names another file."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured on a device."""

    call_seconds: float
    """How long a call takes that does nothing."""
    byte_speed: float
    """How many times faster than the nominal machine it reads and writes."""
    flop_speed: float
    """How many times faster it multiplies."""
    num_threads: int
    """How many threads PyTorch had."""


def calibration_file() -> Path:
    """Where the file is."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "koila" / "calibration.json"


def save_speeds(found: dict[str, Speeds], file: Path) -> None:
    """Write what was measured, by type of device; what the file says of other devices stays."""
    known = {**_read(file), **found}
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "torch": torch.__version__,
        "devices": {name: asdict(each) for name, each in known.items()},
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Speeds]:
    """What a file says, by type of device; nothing if it says nothing that holds here."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["torch"] != torch.__version__:
            return _ignored("it was measured with another PyTorch")
        found = {str(name): Speeds(**each) for name, each in content["devices"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return _ignored("it is damaged")
    if not all(_is_sound(each) for each in found.values()):
        return _ignored("it is damaged")
    return found


def _is_sound(speeds: Speeds) -> bool:
    values = asdict(speeds).values()
    return all(isinstance(value, (int, float)) and 1e-9 < value < 1e9 for value in values)


def _ignored(reason: str) -> dict[str, Speeds]:
    events.count(f"calibration::ignored::{reason}")
    return {}


def calibrated(rules: DeviceRules, speeds: Speeds) -> DeviceRules:
    """The row of a device with the speeds that were measured."""
    return replace(
        rules, call_seconds=speeds.call_seconds, byte_speed=speeds.byte_speed, flop_speed=speeds.flop_speed,
        speed_threads=speeds.num_threads,
    )  # fmt: skip


@cache
def use_calibration() -> None:
    """Let plans know the machine at hand; the file is read once."""
    for name, speeds in _read(calibration_file()).items():
        if name == "cpu" and speeds.num_threads != torch.get_num_threads():
            _ignored("it was measured with another number of threads")
        else:
            register_device(calibrated(rules_for(name, {}), speeds))
