"""New sizes in a loop: `python -m benchmarks.sizes`.

*Takes* small models (GPT, GPT-2, BERT, Llama, ResNet with batch statistics, LSTM, an encoder-decoder) and thirty sizes
each: primes, a batch as long as its sequences, one, a short last batch, longer than ever; with `--lengths` only the
length is new, and the batch is the same in all steps. *Gives* a table: what the
first step costs beyond a known one, what a step with a new size costs beyond it, how many joint graphs were built from
formulas, how many were traced, and how many sizes were refused. Times are CPU time of this process.

Each program runs in chunks of three samples, and within a byte budget of its own: three quarters of what eager's first
step takes at its peak, memory inside of kernels included. So the first step of every program is really cut (where a
budget is not felt, it is nearly free, and nothing can be told from comparing with it), smaller sizes than the first
run whole or nearly so, and the largest ones can still be met. `--bytes` sets one budget for all programs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import koila
from benchmarks.programs import Block, Decoder
from koila.ir.cache import clear_all
from koila.planning.tracker import WorkspaceTracker

SIZES = (
    (8, 37), (8, 27), (6, 23), (8, 31), (8, 20), (8, 41), (8, 43), (7, 47), (13, 13), (16, 16), (8, 1), (1, 29),
    (5, 53), (8, 59), (2, 61), (3, 19), (8, 17), (8, 12), (8, 9), (4, 24), (8, 64), (8, 29), (3, 67), (8, 71),
    (8, 11), (8, 33), (8, 50), (8, 6), (2, 2), (8, 80),
)  # fmt: skip
"""(batch, length) of thirty steps."""
LENGTHS = tuple((8, n) for n in (37, 27, 31, 20, 41, 43, 47, 53, 59, 64, 29, 33, 50, 71, 73, 78, 39, 45, 57, 67))
"""(batch, length) of twenty steps in which the batch stays the same."""

Step = Callable[[nn.Module, int, int, bool], torch.Tensor]


def _lazy(is_lazy: bool, *values: torch.Tensor) -> Any:
    return koila.lazy(*values) if is_lazy else values


def tokens(batch: int, length: int, words: int) -> torch.Tensor:
    """Words that depend on the sizes only."""
    return torch.randint(1, words, (batch, length), generator=torch.Generator().manual_seed(batch * 1000 + length))


def gpt() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: int, length: int, is_lazy: bool) -> torch.Tensor:
        words, targets = _lazy(is_lazy, tokens(batch, length, 31), tokens(batch, length, 31))
        return F.cross_entropy(model(words).flatten(0, 1), targets.flatten())

    return Decoder(31, 96, 16, [Block(16, 2, True) for _ in range(2)]), step


def language(model: nn.Module, words: int, masked: bool = False) -> tuple[nn.Module, Step]:
    """A model of transformers that computes its own loss."""

    def step(model: nn.Module, batch: int, length: int, is_lazy: bool) -> torch.Tensor:
        text = tokens(batch, length, words)
        ids, labels, mask = _lazy(is_lazy, text, text.clone(), (text != 3).long())
        masks = {"attention_mask": mask} if masked else {}
        return model(input_ids=ids, labels=labels, **masks).loss  # type: ignore[no-any-return]

    return model, step


def gpt2() -> tuple[nn.Module, Step]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return language(GPT2LMHeadModel(GPT2Config(
        vocab_size=211, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )), 211)  # fmt: skip


def bert() -> tuple[nn.Module, Step]:
    from transformers import BertConfig, BertForMaskedLM

    return language(BertForMaskedLM(BertConfig(
        vocab_size=211, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=128,
    )), 211, masked=True)  # fmt: skip


def llama() -> tuple[nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return language(LlamaForCausalLM(LlamaConfig(
        vocab_size=211, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )), 211, masked=True)  # fmt: skip


def translation() -> tuple[nn.Module, Step]:
    from transformers import BartConfig, BartForConditionalGeneration

    return language(BartForConditionalGeneration(BartConfig(
        vocab_size=211, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
        decoder_start_token_id=2, forced_eos_token_id=None,
    )), 211, masked=True)  # fmt: skip


def resnet() -> tuple[nn.Module, Step]:
    from transformers import ResNetConfig, ResNetForImageClassification

    def step(model: nn.Module, batch: int, length: int, is_lazy: bool) -> torch.Tensor:
        noise = torch.Generator().manual_seed(batch * 1000 + length)
        pictures = torch.randn(max(2, batch), 3, 16 + length, 16 + length, generator=noise, dtype=model.dtype)  # type: ignore[arg-type]
        x, labels = _lazy(is_lazy, pictures, tokens(max(2, batch), 1, 5)[:, 0])
        return model(pixel_values=x, labels=labels).loss  # type: ignore[no-any-return]

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    return ResNetForImageClassification(config), step


class Recurrent(nn.Module):
    """A language model of one LSTM."""

    def __init__(self, words: int = 50, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(words))[0])  # type: ignore[no-any-return]


def lstm() -> tuple[nn.Module, Step]:
    def step(model: nn.Module, batch: int, length: int, is_lazy: bool) -> torch.Tensor:
        words, targets = _lazy(is_lazy, tokens(batch, length, 50), tokens(batch, length, 50))
        return F.cross_entropy(model(words).flatten(0, 1), targets.flatten())

    return Recurrent(), step


PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "gpt": gpt, "gpt2": gpt2, "bert": bert, "llama": llama, "resnet": resnet, "lstm": lstm, "translation": translation,
}  # fmt: skip


@dataclass
class Row:
    """What a loop over sizes cost."""

    program: str
    way: str
    first: float = 0.0
    known: float = 0.0
    new: list[float] = field(default_factory=list)
    built: int = 0
    traced: int = 0
    refused: int = 0

    @property
    def ratio(self) -> float:
        """What a new size costs beyond a known one, as a part of what the first step cost beyond it."""
        return (statistics.median(self.new) - self.known) / (self.first - self.known)

    def __str__(self) -> str:
        times = f"{self.first:.2f} | {self.known:.3f} | {statistics.median(self.new):.3f} | {max(self.new):.2f}"
        counts = f"{self.built} | {self.traced} | {self.refused}"
        return f"| {self.program} | {self.way} | {times} | {self.ratio:.0%} | {counts} |"


SHARE = 0.75
"""The byte budget of a program over the peak of eager's first step."""


def byte_budget(name: str, size: tuple[int, int]) -> str:
    """A budget that the first step of a program does not fit without being cut."""
    torch.manual_seed(0)
    model, step = PROGRAMS[name]()
    step(model, *size, False).backward()  # What PyTorch makes once is no part of the peak.
    model.zero_grad()
    with WorkspaceTracker() as tracker:
        step(model, *size, False).backward()
    return f"{round(SHARE * tracker.peak_bytes / 1024)}KiB"


def measure(name: str, way: str, scope: Callable[[], AbstractContextManager[Any]], sizes: Any = SIZES) -> Row:
    """Run a loop over sizes; the first three steps have the first size."""
    torch.manual_seed(0)
    model, step = PROGRAMS[name]()
    clear_all()
    row = Row(name, way)

    def once(batch: int, length: int) -> float:
        started = time.process_time()
        with scope():
            step(model, batch, length, True).backward()
        model.zero_grad()
        return time.process_time() - started

    step(model, *sizes[0], False).backward()
    row.first = once(*sizes[0])
    row.known = min(once(*sizes[0]) for _ in range(3))
    koila.metrics.reset()
    for number, size in enumerate(sizes[1:]):
        try:
            seconds = once(*size)
        except koila.BudgetError:
            row.refused += 1
            continue
        if number:  # The second size makes the formulas.
            row.new.append(seconds)
    row.built, row.traced = (int(koila.metrics.counter_value(each)) for each in ("sizes::built", "traces"))
    return row


def warm_up() -> None:
    """Run a small program: what PyTorch loads once for a process is no part of anybody's first step."""
    with koila.budget(chunk_size=3):
        F.layer_norm(nn.Linear(4, 4)(koila.lazy(torch.randn(8, 4))), (4,)).sum().backward()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sizes", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--bytes", help="the byte budget; unless given, three quarters of eager's first peak")
    parser.add_argument("--lengths", action="store_true", help="only the length is new")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = LENGTHS if given.lengths else SIZES
    warm_up()
    print(
        "| program | way | first s | known s | new s, median | new s, most | of the first | built | traced | refused |"
    )
    print("|---" * 10 + "|")
    for name in given.only or PROGRAMS:
        print(measure(name, "chunks of 3", lambda: koila.budget(chunk_size=3), sizes), flush=True)
        allowed = given.bytes or byte_budget(name, sizes[0])
        print(measure(name, allowed, partial(koila.budget, allowed), sizes), flush=True)


if __name__ == "__main__":
    main()
