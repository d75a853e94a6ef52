"""S4: types, layouts and sizes: casts, channels_last, empty and 0-d, complex, bool, half, quantised, sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila

pytestmark = pytest.mark.semantics("S4")
BUDGETS: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"chunk_size": 5}, {"allowed": "1MiB"}]
Program = Callable[[torch.Tensor], Any]


def image() -> torch.Tensor:
    return torch.randn(7, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


PROGRAMS: dict[str, Program] = {
    "to dtype": lambda x: [x.to(torch.float32) * 2, x.float(), x.to(torch.int64), x.to(x.float()), x.type(torch.int32)],
    "to nothing": lambda x: [x.to("cpu"), x.to(x.dtype), x.cpu(), x.double(), x.contiguous()],
    "to copies": lambda x: [x.to(x.dtype, copy=True).add_(1), x],
    "channels_last": lambda x: [
        F.conv2d(x.to(memory_format=torch.channels_last), x.new_ones(2, 3, 3, 3)),
        x.contiguous(memory_format=torch.channels_last).relu(),
        x.to(memory_format=torch.channels_last).flatten(1).sum(1),
    ],
    "not contiguous": lambda x: [x.transpose(1, 3).reshape(7, -1), x[:, ::2, ::2].exp(), x.mT @ x, x.movedim(3, 0)],
    "complex": lambda x: [
        torch.complex(x, x * 2).abs(),
        torch.fft.fft(x).conj() * 2,
        torch.fft.fft(x).conj().imag,
        torch.view_as_real(torch.fft.rfft2(x)).sum(),
        torch.complex(x, x).mH.angle(),
        (x * 1j).conj().resolve_conj(),
        torch.fft.ifft(torch.fft.fft(x)).real,
    ],
    "negative bit": lambda x: [torch.complex(x, x).conj().imag * 2, (x * (1 + 2j)).conj().imag.contiguous()],
    "bool": lambda x: [x > 0, (x > 0) & (x < 1), ~(x > 0), (x > 0).any(1), (x > 0).sum(), (x > 0).all()],
    "integers": lambda x: [
        (x * 100).to(kind).sum(0) for kind in (torch.int8, torch.int16, torch.int32, torch.int64)
    ] + [(x.abs() * 10).to(torch.uint8) // 3],
    "half": lambda x: [
        (x.to(kind) * 2 + 1).to(torch.float64) for kind in (torch.bfloat16, torch.float16)
    ],
    "promotion": lambda x: [x.float() + 1, (x > 0) + 1, (x * 3).long() / 2, x.float() * x, x.half() * torch.ones(())],
    "empty": lambda x: [x[:, :0], x[:, :0].sum(), x[:0].mean(0), x[3:3].flatten(1), x[:, :0].max(2).values],
    "0-d": lambda x: [x.sum(), x.sum() * 2, x[0, 0, 0, 0], x.mean().expand(3), x.sum().reshape(1, 1), x.max()],
    "view as another type": lambda x: [x.float().view(torch.int32), x.view(torch.int64), x.float().view(torch.uint8)],
    "finite": lambda x: [torch.nan_to_num(x / 0), (x / 0).isinf(), torch.finfo(x.dtype).max * (x > 0)],
    "quantised": lambda x: [
        torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8).dequantize(),
        torch.quantize_per_tensor(x.float(), 0.1, 3, torch.quint8).int_repr(),
        torch.quantize_per_channel(
            x.float(), torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64), 1, torch.qint8
        ).dequantize() * 2,
        torch.quantize_per_tensor_dynamic(x.float(), torch.qint8, False).dequantize(),
        torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, 0, 255),
    ],
    "sparse": lambda x: [
        x.flatten(1).to_sparse().to_dense() * 2,
        torch.sparse.mm(x.flatten(1).to_sparse(), x.flatten(1).T),
        x.flatten(1).relu().to_sparse_csr().to_dense(),
    ],
}  # fmt: skip


def outcome(name: str, wrap: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    return list(koila.run(PROGRAMS[name](wrap(image()))))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, budget: dict[str, Any]) -> None:
    expected = outcome(name, lambda x: x)
    with koila.budget(**budget):
        found = outcome(name, koila.lazy)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        tolerance = 1e-10 if theirs.dtype in (torch.float64, torch.complex128) else 1e-6
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("budget", BUDGETS[:3])
def test_conjugation_is_known_before_anything_runs(budget: dict[str, Any]) -> None:
    real = torch.complex(image(), image() * 2)
    with koila.budget(**budget):
        x = koila.lazy(real)
        for change in (lambda t: t.conj(), lambda t: t.conj().resolve_conj(), lambda t: (t * 2).conj().imag):
            mine, theirs = change(x), change(real)
            assert (mine.is_conj(), mine.is_neg()) == (theirs.is_conj(), theirs.is_neg())
            torch.testing.assert_close(mine.run(), theirs, rtol=1e-10, atol=0)
        pairs = torch.view_as_real((x * 2).conj().resolve_conj())
        torch.testing.assert_close(pairs.run(), torch.view_as_real((real * 2).conj().resolve_conj()))
        found = koila.lazy(real.conj())
        assert found.is_conj()
        torch.testing.assert_close((found * 2).run(), real.conj() * 2, rtol=1e-10, atol=0)
        with pytest.raises(RuntimeError, match="unresolved"):
            torch.view_as_real(found)


LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    lambda t: t.to(memory_format=torch.channels_last),
    lambda t: t.permute(1, 0, 3, 2),
    lambda t: t[:, ::2],
    lambda t: t.to(torch.bfloat16),
    lambda t: torch.fft.fft(t),
    lambda t: t[:, :0],
)


def test_layouts_are_eagers() -> None:
    x, real = koila.lazy(image()), image()
    for change in LAYOUTS:
        mine, theirs = change(x), change(real)
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert mine.is_contiguous() == theirs.is_contiguous() and mine.nbytes == theirs.nbytes


@pytest.mark.asks_laziness("it asks whether the values are pending")
def test_layouts_are_known_before_anything_runs() -> None:
    x = koila.lazy(image())
    for change in LAYOUTS:
        mine = change(x)
        assert (mine.shape, mine.dtype, mine.is_contiguous()) and mine.stride() is not None
        assert "pending" in repr(mine)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_data_is_eagers() -> None:
    real = image().float()
    expected = torch.quantize_per_tensor(real, 0.1, 2, torch.qint8)
    found = torch.quantize_per_tensor(koila.lazy(real), 0.1, 2, torch.qint8)
    assert found.dtype == torch.qint8 and found.is_quantized and found.shape == real.shape
    assert (found.q_scale(), found.q_zero_point(), found.qscheme()) == (0.1, 2, torch.per_tensor_affine)
    assert torch.equal(koila.run(found).int_repr(), expected.int_repr())
    assert found.dequantize().dtype == torch.float32
    assert torch.equal(koila.run(found.dequantize()), expected.dequantize())


@pytest.mark.asks_laziness("it counts calls that could not be recorded")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_data_runs_eagerly_and_is_counted() -> None:
    torch.quantize_per_tensor(koila.lazy(image().float()), 0.1, 2, torch.qint8)
    assert koila.metrics.counter_value("eager::quantize_per_tensor") == 1
    assert koila.metrics.counter_value("eager_because::quantised data") == 1


def test_a_sparse_tensor_stays_as_it_is_and_is_counted() -> None:
    sparse = image().flatten(1).to_sparse()
    with pytest.warns(koila.KoilaWarning, match="made nothing lazy"):
        assert koila.lazy(sparse) is sparse
    assert [name for name in koila.metrics.counter_names() if name.startswith("inputs::left as they are")]
    with pytest.raises(koila.CaptureError, match="takes a plain strided tensor"):
        koila.LazyTensor(sparse)
