"""Known failures of the field, from their public threads: what was wrong there, shown by hand, is exact here.

Each test first does by hand what the thread reports and sees it go wrong, so that it would notice if its own
program no longer had the property that the failure needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import koila
from tests.models import GPT

Tensors = dict[str, torch.Tensor]


def relative_error(found: Tensors, expected: Tensors) -> float:
    """The largest ‖a−b‖ / ‖b‖ among tensors of the same names."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def gradients(model: nn.Module) -> Tensors:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def statistics(model: nn.Module) -> Tensors:
    return {name: buffer.clone().double() for name, buffer in model.named_buffers() if "running" in name}


def batches_tracked(model: nn.Module) -> set[int]:
    return {int(buffer) for name, buffer in model.named_buffers() if "tracked" in name}


def chunks(*tensors: torch.Tensor, size: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


# koila 0.1


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(28, 16), nn.ReLU(), nn.Linear(16, 10)).double()


def images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 4, 7, generator=generator, dtype=torch.float64), torch.randint(
        0, 10, (batch,), generator=generator
    )


@pytest.mark.parametrize("size", [8, 4, 2, 1])
def test_koila_an_uneven_chunk_of_a_mean_loss(size: int) -> None:
    """rentruewang/aioway#16 (the repository was koila's): a batch of 9 is cut into 8 and 1; the gradient is off."""
    x, y = images(9)
    plain, by_hand, model = classifier(), classifier(), classifier()
    F.cross_entropy(plain(x), y).backward()
    for part, labels in chunks(x, y, size=size):
        F.cross_entropy(by_hand(part), labels).backward()
    assert relative_error(gradients(by_hand), gradients(plain)) > 0.1

    lazy_x, lazy_y = koila.lazy(x, y)
    with koila.budget(chunk_size=size):
        F.cross_entropy(model(lazy_x), lazy_y).backward()
    assert koila.metrics.counter_value("runs::split") == 1
    assert relative_error(gradients(model), gradients(plain)) <= 1e-10


@pytest.mark.parametrize("size", [8, 4, 2, 1])
@pytest.mark.parametrize("lazy_labels", [True, False])
def test_koila_labels_are_cut_with_the_batch(size: int, lazy_labels: bool) -> None:
    """rentruewang/aioway#13: the input is cut, the label tensor is not, and the loss refuses their shapes."""
    x, y = images(9)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(classifier()(x[:size]), y)

    plain, model = classifier(), classifier()
    F.cross_entropy(plain(x), y).backward()
    lazy_x = koila.lazy(x)
    labels = koila.lazy(y) if lazy_labels else y
    with koila.budget(chunk_size=size):
        F.cross_entropy(model(lazy_x), labels).backward()
    assert koila.metrics.counter_value("runs::split") == 1
    assert relative_error(gradients(model), gradients(plain)) <= 1e-10


# Hugging Face Trainer


def documents(lengths: Sequence[int], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next tokens; what lies behind the end of a document is -100."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 31, (len(lengths), context + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.arange(context) >= torch.tensor(lengths)[:, None], -100)
    return tokens[:, :-1].contiguous(), labels


def language_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=31, context=12, width=8, heads=2, layers=1, dropout=0.0).double()


def token_loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.parametrize("lengths", [(1, 11), (12, 1, 0, 5, 12)], ids=["two", "five, one of them empty"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_transformers_micro_batches_with_unequal_numbers_of_labels(lengths: tuple[int, ...], size: int) -> None:
    """huggingface/transformers#24725, huggingface/transformers#34191: the mean of the micro-batches' means is not the
    mean over the tokens: a token of a short document weighs more, and a micro-batch without labels is NaN."""
    tokens, labels = documents(lengths, 12)
    plain, by_hand, model = language_model(), language_model(), language_model()
    loss = token_loss(plain, tokens, labels)
    loss.backward()
    parts = chunks(tokens, labels, size=size)
    if len(parts) > 1:
        for part in parts:
            (token_loss(by_hand, *part) / len(parts)).backward()
        assert not relative_error(gradients(by_hand), gradients(plain)) < 0.05

    lazy_tokens, lazy_labels = koila.lazy(tokens, labels)
    with koila.budget(chunk_size=size):
        found = token_loss(model, lazy_tokens, lazy_labels)
        found.backward()
        assert abs(found.item() - loss.item()) <= 1e-10 * loss.item()
    assert relative_error(gradients(model), gradients(plain)) <= 1e-10


# GradCache


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


def contrastive(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """InfoNCE: each sample against all samples of the batch."""
    scores = F.normalize(left, dim=1) @ F.normalize(right, dim=1).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def grad_cache(model: nn.Module, pairs: tuple[torch.Tensor, torch.Tensor], size: int) -> None:
    """Embeddings of all chunks without a graph, the loss on them, then each chunk again with its gradient."""
    with torch.no_grad():
        embeddings = [torch.cat([model(part) for part in side.split(size)]) for side in pairs]
    leaves = [embedding.requires_grad_() for embedding in embeddings]
    contrastive(*leaves).backward()
    for side, leaf in zip(pairs, leaves, strict=True):
        for part, gradient in zip(side.split(size), leaf.grad.split(size), strict=True):
            model(part).backward(gradient)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_grad_cache_with_batch_normalisation(size: int) -> None:
    """luyug/GradCache#15: each chunk is normalised by itself, and the running statistics change with every chunk."""
    left, right = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plain, by_hand, model = encoder(), encoder(), encoder()
    contrastive(plain(left), plain(right)).backward()
    grad_cache(by_hand, (left, right), size)
    assert relative_error(gradients(by_hand), gradients(plain)) > 0.1
    assert batches_tracked(by_hand) == {4 * -(-8 // size)}

    lazy_left, lazy_right = koila.lazy(left, right)
    with koila.budget(chunk_size=size):
        contrastive(model(lazy_left), model(lazy_right)).backward()
    assert koila.metrics.counter_value("runs::split") == 1
    assert relative_error(gradients(model), gradients(plain)) <= 1e-10
    assert relative_error(statistics(model), statistics(plain)) <= 1e-10
    assert batches_tracked(model) == batches_tracked(plain) == {2}


# torch.utils.checkpoint


def body() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv1d(3, 5, 3, padding=1, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Conv1d(5, 5, 3, bias=False))
    return nn.Sequential(*layers, nn.BatchNorm1d(5)).double()


@pytest.mark.semantics("S13")
@pytest.mark.filterwarnings("ignore:[\\s\\S]*torch.utils.checkpoint is taken as if:koila.KoilaWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_checkpoint_with_batch_normalisation(size: int, use_reentrant: bool) -> None:
    """pytorch/pytorch#96136, pytorch/pytorch#62471: the forward pass of a checkpointed block runs twice, and its
    statistics are updated twice. Inside a budget koila takes the block as if it were not checkpointed, and says so."""
    x = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=use_reentrant)

    plain, by_hand, model = body(), body(), body()
    plain(x).exp().mean().backward()
    run(by_hand, x.clone().requires_grad_()).exp().mean().backward()
    assert relative_error(gradients(by_hand), gradients(plain)) <= 1e-10
    assert relative_error(statistics(by_hand), statistics(plain)) > 0.01
    assert batches_tracked(by_hand) == {2}

    with koila.budget(chunk_size=size):
        run(model, koila.lazy(x)).exp().mean().backward()
    assert relative_error(gradients(model), gradients(plain)) <= 1e-10
    assert relative_error(statistics(model), statistics(plain)) <= 1e-10
    assert batches_tracked(model) == {1}


# Lightning


@pytest.mark.parametrize("size", [1, 2, 3])
def test_lightning_the_last_window_of_an_epoch(size: int) -> None:
    """Lightning-AI/pytorch-lightning#19987: the last window of an epoch has fewer micro-batches than
    `accumulate_grad_batches`, and its gradient is divided by that number all the same."""
    x, y = images(10)
    window, accumulate = 4, 4
    for number, (part, labels) in enumerate(chunks(x, y, size=window)):
        plain, by_hand, model = classifier(), classifier(), classifier()
        F.cross_entropy(plain(part), labels).backward()
        for sample, label in chunks(part, labels, size=window // accumulate):
            (F.cross_entropy(by_hand(sample), label) / accumulate).backward()
        error = relative_error(gradients(by_hand), gradients(plain))
        assert error <= 1e-10 if number < 2 else abs(error - 0.5) <= 1e-10

        lazy_part, lazy_labels = koila.lazy(part, labels)
        with koila.budget(chunk_size=size):
            F.cross_entropy(model(lazy_part), lazy_labels).backward()
        assert relative_error(gradients(model), gradients(plain)) <= 1e-10
