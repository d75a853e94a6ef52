"""What holds for all tests: one thread per process, so that bits are comparable, and fresh counters."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator

import pytest
import torch

import koila
from koila._warnings import forget_warnings
from koila.capture import eager
from koila.capture.at_once import here
from koila.capture.pending import recorder
from koila.planning import trials
from tests.forced import followed, forced
from tests.seeding import seed_present_devices_only

DEVICE = os.environ.get("KOILA_DEVICE", "cpu")
os.environ["KOILA_CALIBRATION"] = "no file: plans are those of the nominal machine"

torch.set_num_threads(1)
seed_present_devices_only()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: collections, of which some tests ask for many, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    koila.metrics.reset()
    forget_warnings()


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which plan is the fastest is a matter of time: tests that ask for it say so."""
    monkeypatch.setattr(trials, "SHARE", 0.0)


NOT_ON_DEVICES = {
    "Embedding sparse": "the simulated device has no sparse tensors",
    "test_what_is_drawn_while_recording": "it looks for the operator by which the CPU draws",
    "test_offload_inside_a_schedule": "it counts the host's memory, too; see tests/accelerator/test_offload.py",
    "test_str_shows_data_and_repr_does_not_run": "the text that it expects has no device",
    "test_json_holds_every_decision": "the text that it expects names the CPU",
    "test_a_plan_can_be_read": "the text that it expects names the CPU",
    "test_offload_of_what_is_kept": "it counts the host's memory, too; see tests/accelerator/test_offload.py",
    **dict.fromkeys(
        (f"memory/test_{name}.py" for name in ("flat", "growth", "limits", "tracker", "witness", "workspace")),
        "it watches the host: its process, its limits, its allocator or its kernels",
    ),
    "memory/test_arena.py": "results of an accelerator never lie in an arena: its kernels take memory as they like",
    "memory/test_out_of_memory.py": "devices have their own: tests/accelerator/test_out_of_memory.py",
}
"""By a part of a test's name, why it makes no sense on the simulated accelerator."""


FORCED = os.environ.get("KOILA_EAGER") == "forced"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if FORCED else ():
        for mark in item.iter_markers("asks_laziness"):
            item.add_marker(pytest.mark.skip(reason=f"it asks for laziness: {mark.args[0]}"))
    for item in items if DEVICE != "cpu" else ():
        for part, reason in NOT_ON_DEVICES.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def default_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`KOILA_DEVICE=sim` runs tests on the simulated accelerator, as far as they name no device themselves."""
    if DEVICE == "cpu":
        yield
        return
    importlib.import_module(f"tests.accelerator.{DEVICE}")
    monkeypatch.setattr(torch, "Generator", _Generator)
    with torch.device(DEVICE):
        yield


class _Generator(torch.Generator):
    """A generator of the default device, where none is named."""

    def __new__(cls, device: str = DEVICE) -> torch.Generator:
        return super().__new__(cls, device)


@pytest.fixture(autouse=True)
def eager_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`KOILA_EAGER=forced` runs tests on eager tensors whose calls all run at once, known or not.

    `KOILA_EAGER=auto`, which koila itself reads, says that of steps that repeat, and few tests have any. Tests that ask
    that something has not run yet are marked with `asks_laziness` and left out.
    """
    if FORCED:
        monkeypatch.delenv("KOILA_EAGER")
        monkeypatch.setattr(koila, "lazy", forced(koila.lazy))
        monkeypatch.setattr(eager, "_followed", followed)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """What a test recorded and did not run is not the next test's matter."""
    yield
    recorder.forget()
    here.clear()


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Python goes from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
