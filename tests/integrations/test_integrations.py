"""The integrations by themselves: what they leave alone, and what they say."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import koila
from koila._budget import current_budget

# koila.loader.


def test_a_loader_keeps_its_length_and_attributes_and_can_be_read_again() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    lazy = koila.loader(loader, budget="1MiB")
    assert len(lazy) == 3 and lazy.batch_size == 2 and lazy.dataset is loader.dataset
    for _ in range(2):
        assert [[type(x).__name__, x.sum().item()] for (x,) in lazy] == [["LazyTensor", total] for total in (1, 5, 9)]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = lazy.nonsense


def test_a_loader_of_dictionaries_and_of_another_dimension() -> None:
    (batch,) = koila.loader([{"x": torch.ones(2, 4), "name": "one"}], batch=1)
    assert batch["x"].batch == koila.BatchInfo(1, 4) and batch["name"] == "one"


def test_a_budget_that_is_none_is_told_when_the_loader_is_made() -> None:
    with pytest.raises(koila.BudgetError, match='budget="2GiB"; accepted'):
        koila.loader([], budget="2G")


# transformers.


class Framework:
    """What the mixin asks of a Trainer."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def training_step(self, inputs: Any) -> Any:
        return current_budget().offload, self._prepare_inputs(inputs)

    prediction_step = training_step


class Mixed(koila.integrations.hf.Mixin, Framework):
    koila_budget = "1MiB"


def test_inputs_of_another_size_are_lazy_without_a_batch() -> None:
    _, inputs = Mixed().training_step({"ids": torch.ones(4, 3), "positions": torch.ones(1, 3), "flag": True})
    assert inputs["ids"].batch == koila.BatchInfo(0, 4) and inputs["positions"].batch is None and inputs["flag"] is True
    assert {inputs[name]._value.budget for name in ("ids", "positions")} == {1 << 20}


def test_predictions_are_computed_before_the_next_batch() -> None:
    _, inputs = Mixed().prediction_step({"ids": torch.ones(4, 3)})
    assert type(inputs["ids"]) is torch.Tensor


def test_offload_holds_inside_of_a_step_and_hides_no_scope_around_it(tmp_path: Any) -> None:
    trainer = Mixed()
    with koila.budget(offload=str(tmp_path)):
        assert trainer.training_step({"x": torch.ones(2)})[0] == str(tmp_path)
    trainer.koila_offload = str(tmp_path)
    assert trainer.training_step({"x": torch.ones(2)})[0] == str(tmp_path)


# Lightning.


def test_the_callback_leaves_the_strategy_as_it_was() -> None:
    class Strategy:
        def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
            return [each + 1 for each in batch]

    trainer = SimpleNamespace(strategy=Strategy())
    callback = koila.integrations.lightning.Budget("1MiB")
    callback.setup(trainer, None, "fit")
    (found,) = trainer.strategy.batch_to_device([torch.zeros(2)], dataloader_idx=0)
    assert type(found) is koila.LazyTensor and found.run().tolist() == [1.0, 1.0]
    callback.teardown(trainer, None, "fit")
    assert type(trainer.strategy.batch_to_device([torch.zeros(2)])[0]) is torch.Tensor


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "koila.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match=r'needs Lightning\n  try: pip install "koila\[lightning\]"'):
        importlib.import_module("koila.integrations.lightning")


def test_a_library_that_has_no_file_here() -> None:
    with pytest.raises(AttributeError, match=r"koila\.integrations has no 'keras'; there are: hf, lightning"):
        _ = koila.integrations.keras
