"""Every example trains a small model and equals its plain run: unsplit to the bit, in chunks and in bytes to 1e-10."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import koila
from koila.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def train(use_koila" in path.read_text(encoding="utf-8"))
"""The others (the demo, the script for `koila run`) have tests of their own."""
TOLERANCE = 1e-10
OPTIONS: dict[str, dict[str, Any]] = {"hf_trainer": {"resume": True}, "lightning_callback": {"manual": True}}
"""What some examples can do besides."""


@pytest.fixture(autouse=True)
def third_parties() -> Iterator[None]:
    """Libraries may warn about their own defaults and log as they like; koila's own warnings stay errors."""
    with warnings.catch_warnings():
        for category in (UserWarning, DeprecationWarning, FutureWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.simplefilter("error", koila.KoilaWarning)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        yield


@cache
def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def plain(name: str, is_special: bool = False) -> dict[str, torch.Tensor]:
    return example(name).train(use_koila=False, **(OPTIONS[name] if is_special else {}))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).double().norm() <= TOLERANCE * tensor.double().norm(), name


def test_the_list_of_examples_is_complete() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}


def test_every_way_to_train_has_an_example() -> None:
    ways = {"accelerate_loop", "diffusion", "hf_trainer", "lightning_callback", "peft_lora", "plain_loop"}
    assert set(NAMES) >= {*ways, "reinforcement", "torchmetrics_loop"}


@pytest.mark.parametrize("name", NAMES)
def test_unsplit_it_is_the_plain_run_to_the_bit(name: str) -> None:
    found = example(name).train(budget=None)
    assert koila.metrics.counter_value("runs::whole") > 0
    for key, tensor in plain(name).items():
        assert torch.equal(torch.as_tensor(found[key]), tensor), key


@pytest.mark.parametrize("name", NAMES)
def test_in_chunks_it_equals_the_plain_run(name: str) -> None:
    with koila.budget(chunk_size=3):
        found = koila.run(example(name).train(budget=None))
    assert koila.metrics.counter_value("runs::split") > 0
    assert_close(found, plain(name))


@pytest.mark.parametrize("name", NAMES)
def test_inside_its_budget_it_equals_the_plain_run(name: str) -> None:
    found = example(name).train()
    assert koila.metrics.counter_value("runs::split") > 0
    assert all(r.projected_bytes is None or r.projected_bytes <= (r.allowed_bytes or 0) for r in koila.reports())
    assert_close(found, plain(name))


@pytest.mark.parametrize("name", ["plain_loop", "accelerate_loop", "hf_trainer", "lightning_callback"])
def test_a_script_that_does_not_know_koila_is_run_inside_the_same_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain run of each example under `koila run`: whatever the framework does with its loader."""
    monkeypatch.setitem(sys.modules, "an_example", example(name))
    for part in ("argv", "path"):
        monkeypatch.setattr(sys, part, list(getattr(sys, part)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "train.py"
    script.write_text("import an_example\nfound = an_example.train(use_koila=False)\n", encoding="utf-8")
    assert main(["run", "--quiet", "--budget", example(name).BUDGET, str(script)]) == 0
    assert koila.metrics.counter_value("runs::split") > 0
    assert_close(koila.run(sys.modules["__main__"].found), plain(name))


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_resuming_and_manual_optimisation(name: str) -> None:
    assert_close(example(name).train(**OPTIONS[name]), plain(name, True))
    assert koila.metrics.counter_value("runs::split") > 0
