"""The check that a person with an accelerator runs, on the simulated one."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from koila import selfcheck
from tests.accelerator import sim


def test_everything_is_right_on_the_simulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a short form; `python -m tests.accelerator.check` is the long one."""
    monkeypatch.setattr(selfcheck, "SHARES", (0.75,))
    sim.limit(sim.live() + (64 << 20))
    report = tmp_path / "report.json"
    assert selfcheck.main(["--device", "sim", "--size", "1", "--json", str(report)]) == 0
    findings = json.loads(report.read_text())["findings"]
    assert {found["program"].split(",")[0] for found in findings} == set(selfcheck.PROGRAMS)
    assert len(findings) > 50
    assert any("tries failed" in found["text"] for found in findings)


def test_what_is_wrong_is_said() -> None:
    checker = selfcheck._Checker("sequences", torch.device("sim:0"), 1, torch.float64, nullcontext)
    other = replace(checker.eager, gradients=[tensor + 1 for tensor in checker.eager.gradients])
    assert not checker._numbers("numbers", other, 1e-10).is_right
    assert not checker._numbers("generator", replace(checker.eager, generator=torch.zeros(1)), 1e-10).is_right
    assert checker._numbers("the same", checker.eager, 0.0).is_right
