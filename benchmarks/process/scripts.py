"""Six plain scripts, as users write them: what the process grows by is measured on these.

*Takes* a name. *Gives* a `Script`: a model, the batch of each step, and the loss of a batch. Nothing here knows koila.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.programs import Batch, Block, Decoder


@dataclass(frozen=True)
class Script:
    """A training loop, or one of inference."""

    model: nn.Module
    batch: Callable[[int], Batch]
    """The batch of a step; the same for the same step."""
    loss: Callable[[Batch], torch.Tensor]
    """The loss of a batch; for inference a number that tells of all of the output."""
    optimizer: Callable[[], torch.optim.Optimizer] | None = None
    """None for inference."""


def _seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _adam(model: nn.Module) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.AdamW(model.parameters(), lr=1e-4)


def _descent(model: nn.Module) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


# Transformers.


def gpt() -> Script:
    """Next tokens, with dropout on the embeddings."""
    model = Decoder(4096, 128, 192, [Block(192, 6, True) for _ in range(4)])

    def batch(step: int) -> Batch:
        tokens = torch.randint(0, 4096, (32, 129), generator=_seeded(step))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Script(model, batch, loss, _adam(model))


def padding() -> Script:
    """BERT as a classifier; each batch is padded to its own longest sentence."""
    config = BertConfig(
        vocab_size=4096, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768,
        max_position_embeddings=256, num_labels=4,
    )  # fmt: skip
    model = BertForSequenceClassification(config)

    def batch(step: int) -> Batch:
        generator = _seeded(step)
        lengths = torch.randint(96, 177 + 8 * (step % 3), (20, 1), generator=generator)
        length = int(lengths.max())
        mask = (torch.arange(length) < lengths).long()
        tokens = torch.randint(1, 4096, (20, length), generator=generator) * mask
        return tokens, mask, torch.randint(0, 4, (20,), generator=generator)

    def loss(batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss
        return found

    return Script(model, batch, loss, _adam(model))


class _Clip(nn.Module):
    """Two encoders and a temperature: every image is compared with every text."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 8, 8)
        self.images = nn.ModuleList(Block(128, 4, False) for _ in range(4))
        self.words = nn.Embedding(2048, 128)
        self.texts = nn.ModuleList(Block(128, 4, True) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.images:
            seen = block(seen)
        read = self.words(tokens)
        for block in self.texts:
            read = block(read)
        left, right = F.normalize(seen.mean(1), dim=-1), F.normalize(read[:, -1], dim=-1)
        return self.scale.exp() * left @ right.T


def clip() -> Script:
    """Images and texts that belong together; the loss is over all pairs of the batch."""
    model = _Clip()

    def batch(step: int) -> Batch:
        generator = _seeded(step)
        images = torch.randn(128, 3, 64, 64, generator=generator)
        return images, torch.randint(0, 2048, (128, 32), generator=generator)

    def loss(batch: Batch) -> torch.Tensor:
        logits = model(*batch)
        own = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return Script(model, batch, loss, _adam(model))


# Convolutions.


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.skip(x))


def resnet() -> Script:
    """Mixup: each image is mixed with another one of the batch; half of the classes are supervised by a slice."""
    widths = (32, 64, 128)
    stages = [_Residual(b, a, s) for b, a, s in ((32, 32, 1), (32, 64, 2), (64, 128, 2))]
    model = nn.Sequential(
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(), *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 20),
    )  # fmt: skip

    def batch(step: int) -> Batch:
        generator = _seeded(step)
        images = torch.randn(128, 3, 40, 40, generator=generator)
        return images, torch.randint(0, 10, (128,), generator=generator), torch.randperm(128, generator=generator)

    def loss(batch: Batch) -> torch.Tensor:
        images, labels, others = batch
        logits = model(0.7 * images + 0.3 * images[others])
        coarse, fine = logits[:, :10], logits[:, 10:]
        mixed = 0.7 * F.cross_entropy(coarse, labels) + 0.3 * F.cross_entropy(coarse, labels[others])
        return mixed + 0.1 * fine[: len(labels) // 2].square().mean()

    return Script(model, batch, loss, _descent(model))


class _UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        double = lambda before, after: nn.Sequential(  # noqa: E731
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
        )  # fmt: skip
        self.down1, self.down2, self.middle = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.join2, self.join1 = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        return self.head(self.join1(torch.cat([self.up1(x), first], 1)))


def unet() -> Script:
    """Segmentation: a label for each pixel."""
    model = _UNet(16)

    def batch(step: int) -> Batch:
        generator = _seeded(step)
        images = torch.randn(32, 3, 96, 96, generator=generator)
        return images, torch.randint(0, 2, (32, 96, 96), generator=generator)

    return Script(model, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), _descent(model))


# Inference.


def inference() -> Script:
    """Scores for a large batch."""
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.LayerNorm(1024), nn.GELU(), nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, 16)
    )

    def batch(step: int) -> Batch:
        return (torch.randn(65536, 64, generator=_seeded(step)),)

    @torch.no_grad()
    def loss(batch: Batch) -> torch.Tensor:
        return model(batch[0]).softmax(-1).square().sum()

    return Script(model.eval(), batch, loss)


SCRIPTS: dict[str, Callable[[], Script]] = {
    "gpt": gpt,
    "padding": padding,
    "clip": clip,
    "resnet": resnet,
    "unet": unet,
    "inference": inference,
}
