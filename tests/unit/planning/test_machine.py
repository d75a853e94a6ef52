"""The calibration file: written, read, and not used where it does not hold; it changes plans, never numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from koila import calibrate, events
from koila.planning import machine
from koila.planning.devices import CPU, register_device, rules_for


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for a calibration file that nobody has read yet."""
    path = tmp_path / "koila" / "calibration.json"
    monkeypatch.setenv(machine.VARIABLE, str(path))
    machine.use_calibration.cache_clear()
    yield path
    register_device(CPU)
    machine.use_calibration.cache_clear()


def test_what_is_measured_is_used(file: Path) -> None:
    assert calibrate.main(["--size", "32"]) == 0
    content = json.loads(file.read_text())
    machine.use_calibration()
    found = rules_for("cpu")
    assert found.call_seconds == content["devices"]["cpu"]["call_seconds"]
    assert found.flop_speed == content["devices"]["cpu"]["flop_speed"]
    assert found.value_bytes == CPU.value_bytes, "what a plan needs does not depend on it"


def test_other_devices_of_the_file_stay(file: Path) -> None:
    speeds = machine.Speeds(1e-6, 2.0, 3.0, torch.get_num_threads())
    machine.save_speeds({"cuda": speeds}, file)
    machine.save_speeds({"cpu": speeds}, file)
    assert set(json.loads(file.read_text())["devices"]) == {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is damaged"),
        ("[]", "it is damaged"),
        (json.dumps({"format": 1, "torch": torch.__version__, "devices": {"cpu": {}}}), "it is damaged"),
        (json.dumps({"format": 1, "torch": "1.0", "devices": {}}), "it was measured with another PyTorch"),
        (
            json.dumps({"format": 1, "torch": torch.__version__, "devices": {"cpu": {
                "call_seconds": -1, "byte_speed": 1, "flop_speed": 1, "num_threads": 1}}}),
            "it is damaged",
        ),
        (
            json.dumps({"format": 1, "torch": torch.__version__, "devices": {"cpu": {
                "call_seconds": 1e-6, "byte_speed": 1, "flop_speed": 1, "num_threads": 999}}}),
            "it was measured with another number of threads",
        ),
    ],
)  # fmt: skip
def test_a_file_that_does_not_hold_is_not_used_and_that_is_said(file: Path, text: str, reason: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    machine.use_calibration()
    assert rules_for("cpu") == CPU
    assert events.counters()[f"calibration::ignored::{reason}"] == 1


def test_without_a_file_nothing_is_said(file: Path) -> None:
    machine.use_calibration()
    assert rules_for("cpu") == CPU
    assert not any(name.startswith("calibration") for name in events.counters())
