"""What training steps do around the loss: penalties on gradients, clipping, scaling, several nets, random layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.exactness.cases import Case, Sizes, check, table, verify


def _critic(s: Sizes) -> nn.Module:
    return nn.Sequential(nn.Linear(s.D, s.C), nn.Tanh(), nn.Linear(s.C, 1))


def _classifier(s: Sizes) -> nn.Module:
    return nn.Sequential(nn.Linear(s.D, s.D), nn.Tanh(), nn.Linear(s.D, s.C))


def _samples(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.D, grad=False)


def _real_and_fake(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D, grad=False), s.x(s.B, s.D, grad=False)


def _labelled(s: Sizes) -> tuple[torch.Tensor, ...]:
    return s.x(s.B, s.D, grad=False), s.y(s.B)


def _wgan_gp(net: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    share = torch.rand(real.shape[0], 1, dtype=real.dtype)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    score = net(mixed)
    gradient = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True)[0]
    penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
    return net(fake).mean() - net(real).mean() + 10 * penalty


def _r1(net: nn.Module, real: torch.Tensor) -> torch.Tensor:
    real = real.detach().requires_grad_(True)
    score = net(real)
    (gradient,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    return F.softplus(-score).mean() + 0.5 * gradient.square().sum(1).mean()


def _jacobian_penalty(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    logits = net(x)
    rows = [torch.autograd.grad(logits[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
    return F.cross_entropy(logits, y) + torch.stack(rows).square().mean()


def _hessian_vector(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters, create_graph=True)
    return sum((g * p.detach().cos()).sum() for g, p in zip(gradients, parameters, strict=True))


def _gradient_norm(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([g.square().sum() for g in gradients]).sum().sqrt()


def _maml(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    fast = dict(net.named_parameters())
    inner = F.cross_entropy(net(x), y)
    gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
    return F.cross_entropy(functional_call(net, fast, (x.sin(),)), y)


def _force_field(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    energy = net(x)
    force = -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    return F.mse_loss(energy, torch.ones_like(energy)) + F.mse_loss(force, torch.zeros_like(force))


def _input_gradient(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y), x)
    return F.cross_entropy(net(x.detach() + 0.1 * gradient.sign()), y)


@pytest.mark.semantics("S11")
@table(
    Case("WGAN-GP", _wgan_gp, _real_and_fake, _critic),
    Case("R1", _r1, _samples, _critic),
    Case("Jacobian penalty", _jacobian_penalty, _labelled, _classifier),
    Case("Hessian times vector", _hessian_vector, _labelled, _classifier),
    Case("norm of the gradient", _gradient_norm, _labelled, _classifier),
    Case("MAML", _maml, _labelled, _classifier),
    Case("energy and force", _force_field, _samples, _critic),
    Case("adversarial example", _input_gradient, _labelled, _classifier),
)
def test_double_backward(case: Case) -> None:
    verify(case)


@pytest.mark.semantics("S11")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_second_backward_through_create_graph() -> None:
    def program(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        F.cross_entropy(net(x), y).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in net.parameters())
        grads = torch.autograd.grad(penalty, list(net.parameters()))
        for p, g in zip(net.parameters(), grads, strict=True):
            p.grad = g
        return torch.zeros(())

    check(program, _labelled, _classifier, backward=False, whole="create_graph=True needs the graph of the whole run")


def _optimised(step: Callable[..., Any]) -> Callable[..., Any]:
    """Two steps of AdamW; the parameters afterwards are compared."""

    def program(net: nn.Module, *inputs: torch.Tensor) -> Any:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            seen.append(step(net, optimizer, *inputs))
        return seen

    return program


def _clipped(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    F.cross_entropy(net(x), y).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    return norm


def _clipped_by_value(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    optimizer.step()
    return loss.item()


def _scaled(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item(), norm, scaler.get_scale()


def _overflowed(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(net(x), y) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def _accumulated(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    (F.cross_entropy(net(x), y) / 2).backward()
    (F.cross_entropy(net(x.sin()), y) / 2).backward()
    optimizer.step()
    return optimizer.param_groups[0]["lr"]


def _read_first(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    seen = loss.item()
    loss.backward()
    optimizer.step()
    return seen, int((logits.argmax(1) == y).sum())


def _frozen(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    net[0].requires_grad_(False)
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    "step",
    [_clipped, _clipped_by_value, _scaled, _overflowed, _accumulated, _read_first, _frozen],
    ids=[
        "clip_grad_norm_",
        "clip_grad_value_",
        "GradScaler",
        "GradScaler with infinities",
        "accumulation",
        "loss read before backward",
        "frozen layers",
    ],
)
def test_step(step: Callable[..., Any]) -> None:
    check(_optimised(step), _labelled, _classifier, backward=False)


class _Gan(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(s.D, s.D, False), nn.BatchNorm1d(s.D), nn.Tanh(), nn.Linear(s.D, s.D))
        self.critic = _critic(s)


@pytest.mark.semantics("S21")
@pytest.mark.parametrize("noise", ["randn_like", "given"])
def test_gan_step(noise: str) -> None:
    def program(net: _Gan, real: torch.Tensor, given: torch.Tensor) -> Any:
        ones, zeros = torch.ones(real.shape[0], 1, dtype=real.dtype), torch.zeros(real.shape[0], 1, dtype=real.dtype)
        critic, generator = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.critic, net.generator))
        fake = net.generator(torch.randn_like(real) if noise == "randn_like" else given)
        critic.zero_grad()
        loss = F.binary_cross_entropy_with_logits(net.critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(net.critic(fake.detach()), zeros)
        loss.backward()
        critic.step()
        generator.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(net.critic(fake), ones)
        fooled.backward()
        generator.step()
        return loss.item(), fooled.item()

    check(program, _real_and_fake, _Gan, backward=False)


@pytest.mark.semantics("S21")
def test_gan_step_with_noise_outside() -> None:
    """The noise is a real tensor: what is made from it alone runs eagerly."""

    def program(net: _Gan, real: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        fake = net.generator(torch.randn(real.shape, dtype=real.dtype))
        return F.softplus(net.critic(fake)).mean() + F.softplus(-net.critic(real)).mean()

    check(program, _real_and_fake, _Gan, tolerance=1e-10, chunks=(1, 3))


def _drop_path(x: torch.Tensor, keep: float = 0.6) -> torch.Tensor:
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    mask = keep + torch.rand(shape, dtype=x.dtype)
    return x / keep * mask.floor_()


def _stochastic_depth(x: torch.Tensor, keep: float = 0.6) -> torch.Tensor:
    noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype).bernoulli_(keep)
    return x * noise.div_(keep)


def _new_empty(x: torch.Tensor, keep: float = 0.6) -> torch.Tensor:
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    mask.div_(keep)
    return x * mask


def _sequences(s: Sizes) -> torch.Tensor:
    return s.x(s.B, s.T, s.D)


def _linear(s: Sizes) -> nn.Module:
    return nn.Linear(s.D, s.D)


def _random(name: str, program: Callable[..., Any], **more: Any) -> Case:
    return Case(name, program, more.pop("inputs", _sequences), _linear, options=more)


@pytest.mark.semantics("S19")
@table(
    _random("dropout", lambda net, x: F.dropout(net(F.dropout(x, 0.3)), 0.5)),
    _random("dropout of one", lambda net, x: F.dropout(net(x), 1.0) + x),
    _random("dropout in place", lambda net, x: F.dropout(net(x), 0.5, inplace=True)),
    _random("dropout1d", lambda net, x: F.dropout1d(net(x), 0.5)),
    _random("dropout2d", lambda net, x: F.dropout2d(net(x)[..., None], 0.5)),
    _random("dropout3d", lambda net, x: F.dropout3d(net(x)[..., None, None], 0.5)),
    _random("alpha_dropout", lambda net, x: F.alpha_dropout(net(x), 0.5, training=True)),
    _random("feature_alpha_dropout", lambda net, x: F.feature_alpha_dropout(net(x), 0.5, training=True)),
    _random(
        "dropout along another dim", lambda net, x: F.dropout(net(x), 0.5), inputs=lambda s: s.x(s.T, s.B, s.D), batch=1
    ),
    _random("drop-path", lambda net, x: x + _drop_path(net(x))),
    _random("drop-path by new_empty", lambda net, x: x + _new_empty(net(x))),
    _random("stochastic depth per sample", lambda net, x: x + _stochastic_depth(net(x))),
    _random(
        "stochastic depth per batch",
        lambda net, x: x + net(x) if torch.rand(()).item() < 0.5 else x + x * net.weight.sum(),
    ),
    Case(
        "bernoulli of lazy probabilities",
        lambda net, x: net(x) * torch.bernoulli(torch.full_like(x[:, :1, :1], 0.5)),
        _sequences,
        _linear,
        "the probabilities run before the draw",
    ),
    _random("noise added", lambda net, x: net(x + 0.1 * torch.randn_like(x))),
    _random("noise per sample", lambda net, x: net(x) * torch.rand_like(x[:, :1, :1])),
    _random("reparametrisation", lambda net, x: (m := net(x)) + (0.5 * x).exp() * torch.randn_like(m)),
    _random("normal_ on a copy", lambda net, x: net(x) * x.clone().detach().normal_()),
    _random("gumbel_softmax", lambda net, x: F.gumbel_softmax(net(x), hard=True, tau=0.7)),
    _random("rrelu", lambda net, x: F.rrelu(net(x), training=True)),
    _random("a draw between lazy ones", lambda net, x: F.dropout(net(x), 0.5) * torch.rand(()) + F.dropout(x, 0.2)),
    _random("randperm of tokens", lambda net, x: net(x[:, torch.randperm(x.shape[1])])),
    _random("random mask of tokens", lambda net, x: net(x.masked_fill(torch.rand(x.shape[:2])[..., None] < 0.3, 0.0))),
    _random(
        "masked autoencoder",
        lambda net, x: net(x.gather(1, torch.rand(x.shape[:2]).argsort(1)[:, :2, None].expand(-1, -1, x.shape[2]))),
    ),
)
def test_random(case: Case) -> None:
    verify(case)


@pytest.mark.semantics("S10")
def test_two_backwards_with_retained_graph() -> None:
    def program(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = net(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        logits.square().mean().backward()
        return torch.zeros(())

    check(program, _labelled, _classifier, backward=False)


@pytest.mark.semantics("S10")
def test_backward_with_a_seed() -> None:
    def program(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = net(x)
        logits.backward(torch.arange(logits.numel(), dtype=logits.dtype).view(logits.shape).cos())
        return logits

    check(program, _labelled, _classifier, backward=False)


def test_value_used_by_eager_code() -> None:
    """A forced value that requires grad comes out with a history of its own."""

    def program(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        features = net(x)
        real = features.run() if hasattr(features, "run") else features
        labels = y.run() if hasattr(y, "run") else y
        return F.cross_entropy(real.sin(), labels)

    check(program, _labelled, _classifier)
