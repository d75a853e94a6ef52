"""Training loops of two ranks as Accelerate, transformers' Trainer, torchmetrics and Lightning write them.

`make` makes the inputs lazy, or leaves them as they are. The frameworks find the two ranks by `under_torchrun`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.distributed.ranks import WORLD_SIZE, Way


def under_torchrun(rank: int) -> None:
    """What `torchrun` tells a process; the ranks have met already, so nobody listens at the port."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="koila",
        ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip


def samples(num: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (num,), generator=generator))


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.clone() for name, value in module.state_dict().items()}


# Accelerate and torchmetrics.


def gathered_and_reduced(rank: int, make: Way) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD_SIZE
    x = make(torch.arange(12.0, dtype=torch.float64).reshape(4, 3) + 10 * rank)
    uneven = make(torch.ones(2 + rank, 3, dtype=torch.float64)) * 2
    return [
        accelerator.gather(x.mean()),
        accelerator.gather({"rows": x * 2, "sums": [x.sum(1)]}),
        accelerator.reduce(x.mean() * 1, "mean"),
        accelerator.gather_for_metrics(x * 3),
        accelerator.gather(accelerator.pad_across_processes(uneven)),
    ]


def accelerated_training(rank: int, make: Way) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=4))
    logged: list[Any] = []
    for x, y in loader:
        with accelerator.accumulate(model):
            x, y = make(x, y)
            out = model(x)
            loss = F.cross_entropy(out, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        guesses, labels = accelerator.gather_for_metrics((out.argmax(1), y))
        logged += [accelerator.gather(loss.detach()).mean(), (guesses == labels).sum()]
    return logged, state(model)


def metrics(rank: int, make: Way) -> Any:
    import torchmetrics

    mean, rows = torchmetrics.MeanMetric().set_dtype(torch.float64), torchmetrics.CatMetric().set_dtype(torch.float64)
    for step in range(2):
        x = make(torch.arange(4.0, dtype=torch.float64) + 10 * rank + step)
        mean.update((x * 2).mean())
        rows.update(x * 3)
    return mean.compute(), rows.compute()


# transformers' Trainer.


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.rows = [{"x": x, "labels": y} for x, y in samples()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Collator:
    """Makes a batch in the process that loads it."""

    def __init__(self, make: Way) -> None:
        self.make = make

    def __call__(self, rows: list[Mapping[str, torch.Tensor]]) -> Any:
        return self.make({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def trainer(rank: int, make: Way, num_workers: int = 0) -> Any:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, per_device_eval_batch_size=5, max_steps=3, logging_steps=1,
            gradient_accumulation_steps=2, learning_rate=0.1, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no", seed=1, label_names=["labels"], dataloader_num_workers=num_workers, log_level="error",
            dataloader_pin_memory=False,
        )  # fmt: skip
        made = Trainer(WithLoss(), arguments, train_dataset=Rows(), eval_dataset=Rows(), data_collator=Collator(make))
        made.train()
        evaluated = made.evaluate()
    kept = ("loss", "grad_norm", "eval_loss")
    logged = [{name: entry[name] for name in kept if name in entry} for entry in made.state.log_history]
    numbers = [torch.tensor([float(entry[name]) for name in entry], dtype=torch.float64) for entry in logged]
    return numbers, torch.tensor(evaluated["eval_loss"]), state(made.accelerator.unwrap_model(made.model))


def trainer_with_workers(rank: int, make: Way) -> Any:
    return trainer(rank, make, num_workers=1)


# Lightning.


def lightning_logs(rank: int, make: Way) -> Any:
    import lightning
    import torchmetrics

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rows = classifier(), torchmetrics.CatMetric()
            self.gathered: list[torch.Tensor] = []

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return make(*batch)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=True)
            self.log("twice", loss.detach() * 2, sync_dist=True)
            self.rows.update(loss.detach().float())
            self.gathered.append(self.all_gather(loss.detach()) + 0)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            out = self.net(batch[0])
            self.log("accuracy", (out.argmax(1) == batch[1]).double().mean(), sync_dist=True)
            self.log("validation", F.cross_entropy(out, batch[1]), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log("rows", self.rows.compute().sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    found = lightning.Trainer(
        accelerator="cpu", devices=WORLD_SIZE, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0, barebones=False,
    )  # fmt: skip
    loaders = DataLoader(samples(), batch_size=4), DataLoader(samples(16), batch_size=4)
    found.fit(module, *loaders)
    logged = {name: torch.as_tensor(float(value)) for name, value in sorted(found.callback_metrics.items())}
    return logged, module.gathered, state(module.net)
