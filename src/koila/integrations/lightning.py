"""Lightning with lazy batches: `Trainer(callbacks=[koila.integrations.lightning.Budget("4GiB")])`.

*Takes* the batches that the strategy has put on their device. *Gives* them to `training_step`, `validation_step`,
`test_step` and `predict_step` as lazy tensors; manual optimisation is no different.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError('koila.integrations.lightning needs Lightning\n  try: pip install "koila[lightning]"') from error

from koila._api import run
from koila._budget import read_bytes
from koila.capture.inputs import make_lazy


class Budget(Callback):
    """Makes every batch of a trainer lazy, with a budget.

    >>> Budget("4GiB").budget
    '4GiB'
    """

    def __init__(self, budget: object = None, batch: Any = 0) -> None:
        """
        Args:
            budget: What a step may allocate, as in `koila.lazy`; None: what is free.
            batch: Where the batch dimension is, as in `koila.lazy`; tensors of another size there are lazy without one.

        Raises:
            BudgetError: The budget is not one.
        """
        if budget is not None:
            read_bytes(budget, "budget")
        self.budget, self.batch = budget, batch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """From now on, what the strategy has put on its device is made lazy."""
        placed = trainer.strategy.batch_to_device

        def placed_and_lazy(batch: Any, *args: Any, **kwargs: Any) -> Any:
            allowed = None if self.budget is None else read_bytes(self.budget, "budget")
            return make_lazy((placed(batch, *args, **kwargs),), self.batch, allowed, strict=False)

        trainer.strategy.batch_to_device = placed_and_lazy

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The strategy's own way again."""
        vars(trainer.strategy).pop("batch_to_device", None)

    # Results of a batch are computed at its end, so that no batch waits for the end of the epoch.

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        run(outputs)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        run(outputs)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        run(outputs)
