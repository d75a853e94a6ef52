"""For whoever trains with transformers' Trainer: a mixin, and the batch size that you wanted in the first place.

`per_device_train_batch_size` stays what it is: accumulation, the token-weighted mean (`num_items_in_batch`), evaluation
and checkpoints are the Trainer's own. Run it with `python examples/hf_trainer.py`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import koila

BUDGET = "400KiB"


class KoilaTrainer(koila.integrations.hf.Mixin, Trainer):
    koila_budget = BUDGET


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(1, 61, (num, 9), generator=generator)
        self.lengths = torch.randint(3, 10, (num,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        here = torch.arange(9) < self.lengths[index]
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": here.long(), "labels": torch.where(here, row, -100)}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=9, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).double()


def mean_over_tokens(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over all tokens of an optimizer step, however its batches are padded."""
    logits, following = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, following, reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else (following != -100).sum())


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        folder, per_device_train_batch_size=7, per_device_eval_batch_size=8, gradient_accumulation_steps=2, max_steps=2,
        learning_rate=1e-2, save_steps=1, logging_steps=1, seed=3, use_cpu=True, report_to=[], disable_tqdm=True,
        **changes,
    )  # fmt: skip


def train(use_koila: bool = True, budget: object = BUDGET, resume: bool = False) -> dict[str, torch.Tensor]:
    kind = KoilaTrainer if use_koila else Trainer
    with tempfile.TemporaryDirectory() as folder:

        def trainer() -> Trainer:
            made = kind(
                model(), arguments(folder), train_dataset=Sentences(40, 1), eval_dataset=Sentences(12, 2),
                compute_loss_func=mean_over_tokens,
            )  # fmt: skip
            if use_koila:
                made.koila_budget = budget
            return made

        ours = trainer()
        ours.train()
        if resume:
            ours = trainer()
            ours.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        found = {"eval_loss": torch.tensor(ours.evaluate()["eval_loss"], dtype=torch.float64)}
        norms = [entry["grad_norm"] for entry in ours.state.log_history if "grad_norm" in entry]
        return {**ours.model.state_dict(), **found, "grad_norms": torch.tensor(norms, dtype=torch.float64)}


def main() -> None:
    plain, ours = train(use_koila=False), train()
    print(max(koila.reports(), key=lambda report: report.projected_bytes or 0))
    print("largest difference:", max((plain[name] - ours[name]).abs().max().item() for name in plain))


if __name__ == "__main__":
    main()
