"""For whoever trains with Lightning: one callback.

Training, validation, prediction and manual optimisation stay as they are. Run it with
`python examples/lightning_callback.py`.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import koila

BUDGET = "52KiB"


class Classifier(lightning.LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4)).double()

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).softmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 16, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (30,), generator=generator)), batch_size=10)


def train(use_koila: bool = True, budget: object = BUDGET, manual: bool = False) -> dict[str, torch.Tensor]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Classifier(manual)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[koila.integrations.lightning.Budget(budget)] if use_koila else [],
    )  # fmt: skip
    trainer.fit(module, loader(), loader())
    losses = torch.stack([trainer.callback_metrics[name].double() for name in ("train_loss", "val_loss")])
    predicted = trainer.predict(module, loader())
    return {**module.state_dict(), "losses": losses, "predicted": torch.cat(predicted)}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
