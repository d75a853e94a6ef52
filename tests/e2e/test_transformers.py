"""Five architectures from transformers, unchanged, for one step: whole they are eager's to the bit, in chunks exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import koila
from tests.e2e.training import TOLERANCE, relative_error, worst

transformers = pytest.importorskip("transformers")

BATCH = 11
LENGTH = 9
VOCABULARY = 37
CLASSES = 3
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def make_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, loss_type="ForCausalLM", **TOKENS
    )
    return transformers.GPT2LMHeadModel(config)


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, **TOKENS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def make_vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=CLASSES, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def make_resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], num_labels=CLASSES, layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


def text() -> dict[str, torch.Tensor]:
    """Tokens of different lengths; the labels of the second sample are all ignored."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def classes() -> torch.Tensor:
    return torch.randint(0, CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def sentences() -> dict[str, torch.Tensor]:
    return {**text(), "labels": classes()}


def images() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator), "labels": classes()}


@dataclass(frozen=True)
class Outcome:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "gpt2": (make_gpt2, text),
    "llama": (make_llama, text),
    "bert": (make_bert, sentences),
    "vit": (make_vit, images),
    "resnet": (make_resnet, images),
}

ZERO = ("self.key.bias", "k_proj.bias")
"""Parameters whose gradient is zero, as softmax does not see them: both sides hold nothing but rounding."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def step(name: str, dtype: torch.dtype, lazy: bool, chunk_size: int | None = None) -> Outcome:
    make, data = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = make().to(dtype).train()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in data().items()}
    torch.manual_seed(5)
    with koila.budget(chunk_size=chunk_size):
        loss = model(**(koila.lazy(batch) if lazy else batch)).loss
        loss.backward()
        value = koila.run(loss, detach=True).detach()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return Outcome(value, gradients, dict(model.named_buffers()), torch.get_rng_state())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unsplit_is_bit_identical(name: str) -> None:
    found, expected = step(name, torch.float32, lazy=True), step(name, torch.float32, lazy=False)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.generator, expected.generator)
    for mine, theirs in ((found.gradients, expected.gradients), (found.buffers, expected.buffers)):
        assert mine.keys() == theirs.keys()
        assert [key for key in theirs if not torch.equal(mine[key], theirs[key])] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_chunks_is_exact(name: str) -> None:
    expected = step(name, torch.float64, lazy=False)
    size = float(torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm())
    for chunk_size in (1, 3, 4):
        koila.metrics.reset()
        found = step(name, torch.float64, lazy=True, chunk_size=chunk_size)
        # The losses of language models are float32, whatever the model is.
        assert relative_error(found.loss, expected.loss) <= TOLERANCE[found.loss.dtype]
        assert torch.equal(found.generator, expected.generator)
        assert worst(found.buffers, expected.buffers)[0] <= 1e-10
        zero = {key for key in expected.gradients if key.endswith(ZERO)}
        for key in zero:
            assert float(found.gradients.pop(key).norm()) <= 1e-15 * size
        error, key = worst(found.gradients, {k: g for k, g in expected.gradients.items() if k not in zero})
        assert error <= 1e-10, f"{key} at chunk {chunk_size}: {error:.1e}"
        assert koila.metrics.counter_value("runs::split") >= 1
        assert [counter for counter in koila.metrics.counter_names() if counter.startswith("fallback::")] == []
