"""transformers' `Trainer` with lazy batches: `class KoilaTrainer(koila.integrations.hf.Mixin, Trainer)`.

*Takes* the inputs that the Trainer has put on their device. *Gives* them to the model as lazy tensors. Batch sizes,
accumulation, `num_items_in_batch`, evaluation and resuming are the Trainer's own; nothing of transformers is imported.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from koila._api import run
from koila._budget import budget, read_bytes
from koila.capture.inputs import make_lazy


class Mixin:
    """Put it before `Trainer`, and set `koila_budget` on the class or on the trainer.

    The inputs carry the budget to every run that starts from them, and `koila_offload` holds inside of a step.
    """

    koila_budget: object = None
    """What a step may allocate, as in `koila.lazy`; None: what is free."""
    koila_batch: Any = 0
    """Where the batch dimension is, as in `koila.lazy`; inputs of another size there are lazy without a batch."""
    koila_offload: Any = None
    """Where values may wait that do not fit, as in `koila.budget`."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        allowed = None if self.koila_budget is None else read_bytes(self.koila_budget, "koila_budget")
        return make_lazy((prepared,), self.koila_batch, allowed, strict=False)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own."""
        with self._koila_scope():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; its results are computed here, so that no batch waits for the end of the evaluation."""
        with self._koila_scope():
            return run(super().prediction_step(*args, **kwargs))  # type: ignore[misc]

    def _koila_scope(self) -> AbstractContextManager[Any]:
        # A scope that says nothing would hide what a scope around the training says.
        return nullcontext() if self.koila_offload is None else budget(offload=self.koila_offload)
