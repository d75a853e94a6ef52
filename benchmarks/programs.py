"""Programs that nobody tuned koila for, in plain PyTorch or from transformers with random weights.

*Takes* a name. *Gives* a `Program`: model, batch, loss, and what the peers need. Nothing here knows koila.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Program:
    """A step of training, or of inference."""

    model: nn.Module
    batch: Batch
    step: Callable[[Batch], torch.Tensor]
    """The loss of a batch, or for inference the output."""
    is_training: bool = True
    blocks: list[nn.Module] = field(default_factory=list)
    """What a user would checkpoint."""
    weight: Callable[[Batch], torch.Tensor] | None = None
    """The denominator of the mean loss, for micro-batching by hand; None where that would not be exact."""
    fused_loss: Callable[[Batch, Any], torch.Tensor] | None = None
    """The loss by `F.linear_cross_entropy` with these options."""
    leaves: tuple[torch.Tensor, ...] = ()
    """Tensors of the batch that require grad."""

    @property
    def num_samples(self) -> int:
        return self.batch[0].shape[0]

    def gradients(self) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *self.leaves]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def zero_grad(self) -> None:
        for tensor in (*self.model.parameters(), *self.leaves):
            tensor.grad = None

    def chunk(self, start: int, stop: int) -> Batch:
        return tuple(tensor[start:stop] for tensor in self.batch)


def _samples(batch: Batch) -> torch.Tensor:
    return torch.tensor(float(batch[0].shape[0]))


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Transformers.


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.feed = feed or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    """Token and position embeddings, blocks, a norm and an untied head."""

    def __init__(self, vocabulary: int, context: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))


def language(model: Any, batch: int, context: int, vocabulary: int) -> Program:
    tokens = torch.randint(0, vocabulary, (batch, context + 1))

    def fused(batch: Batch, options: Any) -> torch.Tensor:
        hidden = model.features(batch[0]).flatten(0, 1)
        return F.linear_cross_entropy(hidden, model.head.weight, batch[1].flatten(), options=options)

    return Program(
        model,
        (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        lambda batch: _token_loss(model(batch[0]), batch[1]),
        blocks=list(getattr(model, "blocks", ())),
        weight=_samples,
        fused_loss=fused,
    )


def gpt(batch: int = 8, layers: int = 4) -> Program:
    """The GPT of the design: d=256, 8 heads, T=256, V=8192 untied, float32."""
    model = Decoder(8192, 256, 256, [Block(256, 8, True) for _ in range(layers)])
    return language(model, batch, 256, 8192)


def gpt_bfloat16() -> Program:
    """Narrow: a CPU without bfloat16 instructions multiplies slowly."""
    model = Decoder(4096, 256, 32, [Block(32, 2, True) for _ in range(3)]).bfloat16()
    return language(model, 16, 256, 4096)


class Experts(nn.Module):
    """A router that gives each token to the best two of its experts, computed densely."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.router(x).topk(2, dim=-1)
        gates = torch.zeros_like(self.router(x)).scatter(-1, chosen, best.softmax(-1))
        hidden = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("btef,efd,bte->btd", hidden, self.down, gates)


def mixture_of_experts() -> Program:
    model = Decoder(4096, 128, 128, [Block(128, 4, True, Experts(128, 6)) for _ in range(2)])
    return language(model, 16, 128, 4096)


def bert() -> Program:
    """Masked language modelling with dropout; the loss is a mean over the masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = BertForMaskedLM(config)
    tokens = torch.randint(0, 8192, (16, 128))
    labels = torch.where(torch.rand(16, 128) < 0.15, tokens, -100)
    mask = (torch.arange(128) < torch.randint(64, 129, (16, 1))).long()

    def step(batch: Batch) -> torch.Tensor:
        return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss

    return Program(
        model,
        (tokens, mask, labels),
        step,
        blocks=list(model.bert.encoder.layer),
        weight=lambda batch: (batch[2] != -100).sum().float(),
    )


def vit() -> Program:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=96,
        patch_size=8,
        num_labels=100,
    )
    model = ViTForImageClassification(config)
    return Program(
        model,
        (torch.randn(16, 3, 96, 96), torch.randint(0, 100, (16,))),
        lambda batch: F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1]),
        blocks=list(model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer),
        weight=_samples,
    )


# Images.


class Residual(nn.Module):
    """Two 3×3 convolutions, or the bottleneck of ResNet-50."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module], deep: bool) -> None:
        super().__init__()
        middle = outputs // 4 if deep else outputs
        sizes = [(inputs, middle, 1, 1), (middle, middle, 3, stride), (middle, outputs, 1, 1)]
        if not deep:
            sizes = [(inputs, middle, 3, stride), (middle, outputs, 3, 1)]
        layers: list[nn.Module] = []
        for fan_in, fan_out, kernel, step in sizes:
            convolution = nn.Conv2d(fan_in, fan_out, kernel, step, kernel // 2, bias=False)
            layers += [convolution, norm(fan_out), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers[:-1])
        same = stride == 1 and inputs == outputs
        self.skip = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.skip(x))


def resnet(depths: list[int], width: int, norm: Callable[[int], nn.Module], deep: bool) -> nn.Sequential:
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    layers: list[nn.Module] = [nn.Sequential(*stem)]
    inputs = width
    for stage, depth in enumerate(depths):
        outputs = width * 2**stage * (4 if deep else 1)
        for number in range(depth):
            layers.append(Residual(inputs, outputs, 2 if stage and number == 0 else 1, norm, deep))
            inputs = outputs
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 100)))
    return nn.Sequential(*layers)


def _classifier(model: nn.Sequential, batch: int, size: int, exact: bool) -> Program:
    return Program(
        model,
        (torch.randn(batch, 3, size, size), torch.randint(0, 100, (batch,))),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        blocks=list(model[1:-1]),
        weight=_samples if exact else None,
    )


def resnet_groupnorm() -> Program:
    return _classifier(resnet([2, 2, 2, 2], 32, lambda size: nn.GroupNorm(8, size), False), 48, 96, True)


def resnet50_batchnorm() -> Program:
    return _classifier(resnet([3, 4, 6, 3], 32, nn.BatchNorm2d, True), 16, 96, False)


class Widening(nn.Module):
    """Two normalised convolutions beside a plain one, for channels that become more."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.skip(x))


def cnn_batchnorm() -> Program:
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    blocks = [Widening(16, 16, 1), Widening(16, 32, 2), Widening(32, 64, 2)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))
    return _classifier(nn.Sequential(nn.Sequential(*stem), *blocks, head), 32, 96, False)


def resnet18_batchnorm() -> Program:
    return _classifier(resnet([2, 2, 2, 2], 32, nn.BatchNorm2d, False), 128, 96, False)


class Inverted(nn.Module):
    """The block of MobileNetV2: wide, depthwise, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, factor: int = 4) -> None:
        super().__init__()
        wide = factor * inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet() -> Program:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True))
    sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))
    return _classifier(nn.Sequential(stem, *(Inverted(*size) for size in sizes), head), 32, 96, False)


class UNet(nn.Module):
    def __init__(
        self, widths: tuple[int, ...] = (16, 32, 64, 128), norm: Callable[[int], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.norm = norm or (lambda size: nn.GroupNorm(4, size))
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.join = nn.ModuleList(self._double(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 8, 1)

    def _double(self, inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for fan_in in (inputs, outputs):
            layers += [nn.Conv2d(fan_in, outputs, 3, padding=1), self.norm(outputs), nn.SiLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x)


def _segmentation(model: UNet, exact: bool) -> Program:
    return Program(
        model,
        (torch.randn(8, 3, 96, 96), torch.randint(0, 8, (8, 96, 96))),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        blocks=[*model.down, *model.join],
        weight=_samples if exact else None,
    )


def unet() -> Program:
    return _segmentation(UNet(), True)


def unet_batchnorm() -> Program:
    return _segmentation(UNet(norm=nn.BatchNorm2d), False)


# Sequences.


class LSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.tokens(tokens))[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))


def lstm() -> Program:
    return language(LSTM(4096, 256, 2), 32, 64, 4096)


class GatedConvolution(nn.Module):
    """A causal depthwise convolution between gated projections."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.leave = nn.Linear(2 * width, width)
        self.mix = nn.Conv1d(2 * width, 2 * width, kernel, padding=kernel - 1, groups=2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        mixed = self.mix(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.leave(F.silu(mixed) * gate)


def convolutional_sequence() -> Program:
    model = Decoder(4096, 256, 192, [GatedConvolution(192, 4) for _ in range(4)])
    return language(model, 16, 256, 4096)


class StateSpace(nn.Module):
    """A diagonal linear recurrence, by the Fourier transform of its impulse response (S4D)."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.decay = nn.Parameter(torch.rand(width, states))
        self.mixing = nn.Parameter(torch.randn(width, states) / states)
        self.through = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        u = self.norm(x).transpose(1, 2)
        powers = torch.exp(-F.softplus(self.decay)[..., None] * torch.arange(length, dtype=x.dtype))
        impulse = (self.mixing[..., None] * powers).sum(1)
        spectrum = torch.fft.rfft(u, 2 * length) * torch.fft.rfft(impulse, 2 * length)
        y = torch.fft.irfft(spectrum, 2 * length)[..., :length] + self.through[:, None] * u
        return x + F.glu(self.out(F.gelu(y).transpose(1, 2)))


def state_space() -> Program:
    model = Decoder(4096, 256, 128, [StateSpace(128, 16) for _ in range(4)])
    return language(model, 16, 256, 4096)


# Losses over the whole batch, inference, and a batch of one.


class Pair(nn.Module):
    """An image and a text encoder with a contrastive loss over the batch."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.tokens = nn.Embedding(2048, width)
        self.image_blocks = nn.ModuleList(Block(width, 4, False) for _ in range(layers))
        self.text_blocks = nn.ModuleList(Block(width, 4, True) for _ in range(layers))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image, text = self.patches(images).flatten(2).transpose(1, 2), self.tokens(tokens)
        for block in self.image_blocks:
            image = block(image)
        for block in self.text_blocks:
            text = block(text)
        image, text = F.normalize(image.mean(1), dim=-1), F.normalize(text[:, -1], dim=-1)
        logits = self.temperature.exp() * image @ text.t()
        labels = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip() -> Program:
    model = Pair()
    return Program(
        model,
        (torch.randn(48, 3, 64, 64), torch.randint(0, 2048, (48, 32))),
        lambda batch: model(batch[0], batch[1]),
        blocks=[*model.image_blocks, *model.text_blocks],
    )


def inference() -> Program:
    """Classes of many images, without grad."""
    model = resnet([2, 2, 2, 2], 32, nn.BatchNorm2d, False).eval()

    def step(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return model(batch[0]).softmax(1)

    return Program(model, (torch.randn(512, 3, 64, 64),), step, is_training=False, weight=_samples)


def head() -> Program:
    """The head and the loss of a language model on a batch of one."""
    model = nn.Linear(256, 32000, bias=False)
    hidden = torch.randn(1, 4096, 256, requires_grad=True)

    def fused(batch: Batch, options: Any) -> torch.Tensor:
        return F.linear_cross_entropy(batch[0].flatten(0, 1), model.weight, batch[1].flatten(), options=options)

    return Program(
        model,
        (hidden, torch.randint(0, 32000, (1, 4096))),
        lambda batch: _token_loss(model(batch[0]), batch[1]),
        fused_loss=fused,
        leaves=(hidden,),
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    maker.__name__: maker
    for maker in (
        gpt,
        bert,
        vit,
        resnet_groupnorm,
        cnn_batchnorm,
        resnet18_batchnorm,
        resnet50_batchnorm,
        mobilenet,
        unet,
        unet_batchnorm,
        lstm,
        clip,
        mixture_of_experts,
        convolutional_sequence,
        state_space,
        gpt_bfloat16,
        inference,
        head,
    )
}


def make(name: str, seed: int = 0) -> Program:
    """A program, from a seed."""
    torch.manual_seed(seed)
    return PROGRAMS[name]()
