"""What people do around their operators: views and writes, hooks, reads, draws, gradients on the way, buffers.

*Takes* a `Draft`. *Gives* the table `HABITS`, to be mixed with the operators. Lines may use `seen`, a dict of lists
into which hooks put gradients, and `later`, a list of functions that are called after the backward pass; see
`tests.property.environment`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.property.draft import Draft, Refused


def _fresh(d: Draft) -> str:
    """A value that may be written to."""
    source = d.pick(lambda value: value.ndim >= 1)
    return d.assign(d.random.choice(("{}.clone()", "{} * 1.5", "{}.sigmoid()", "{} - 0.1")).format(source))


def _leaf(d: Draft) -> str:
    """A parameter."""
    leaves = [name for name, start in d.starts.items() if start.requires_grad]
    if not leaves:
        raise Refused
    return d.random.choice(leaves)


VIEWS = (
    "{}.view(-1)",
    "{}.transpose(0, -1)",
    "{}[0]",
    "{}[..., :1]",
    "{}[1:]",
    "{}.unsqueeze(0)",
    "{}.detach()",
    "{}.chunk(2)[0]",
    "{}.diagonal()",
    "{}.flatten()",
    "{}.unfold(-1, 1, 1)",
    "{}.expand(2, *{}.shape)",
    "{}.as_strided({}.shape, {}.stride())",
    "{}.movedim(0, -1)",
    "{}.unbind(0)[-1]",
    "{}.narrow(0, 0, 1)",
    "{}.select(-1, 0)",
    "{}.view_as({})",
    "{}.real",
    "{}[None]",
)

WRITES = (
    "{}.mul_(0.7)",
    "{}.add_(0.2)",
    "{}.relu_()",
    "{}[..., 0] = 0.3",
    "{}[0] = 0.1",
    "{}.fill_(0.4)",
    "{}.zero_()",
    "{}[1:] *= 2",
    "{}.clamp_(-0.5, 0.5)",
    "{}.tanh_()",
    "{}.masked_fill_({} > 0.2, 0.1)",
    "{}.neg_()",
)


def alias(d: Draft) -> None:
    """A view that is kept, and writes to it or to its base, before and after it is read."""
    base = _fresh(d)
    view = d.assign(d.random.choice(VIEWS).replace("{}", base))
    if d.random.random() < 0.3:
        view = d.assign(d.random.choice(VIEWS).replace("{}", view))
    if d.random.random() < 0.4:
        d.assign(f"{view} * 0.5")
    for _ in range(d.random.randint(1, 2)):
        written = d.random.choice((base, view))
        other = d.like(d.shape(written))
        text = d.random.choice((*WRITES, f"{{}}.copy_({other})", f"{{}}.add_({other})", f"{{}} -= {other}"))
        d.execute(text.replace("{}", written), base, view)
        if d.random.random() < 0.3:
            d.assign(f"{d.random.choice((base, view))}.sin()")


def metadata(d: Draft) -> None:
    """In-place operators that change how a tensor is laid out, with a view of it alive or not."""
    base = _fresh(d)
    checked = [base]
    if d.random.random() < 0.5:
        checked.append(d.assign(d.random.choice(VIEWS).replace("{}", base)))
    text = d.random.choice(("transpose_(0, -1)", "unsqueeze_(0)", "squeeze_()", "t_()", "swapdims_(0, -1)"))
    d.execute(f"{base}.{text}", *checked)
    if d.random.random() < 0.5:
        d.execute(d.random.choice(WRITES).replace("{}", base), *checked)


def out(d: Draft) -> None:
    """`out=` of a call on values without gradients."""
    target = d.assign(f"torch.zeros_like({d.pick(lambda value: value.ndim >= 1)}).detach()")
    other = d.like(d.shape(target))
    d.execute(f"torch.add({other}.detach(), 1.0, out={target})", target)


def hook(d: Draft) -> None:
    """Hooks on values and on parameters, before or after their use."""
    if d.random.random() < 0.3:
        name = _leaf(d)
        note = f"seen.setdefault('{name}', []).append"
        texts = [
            f"{name}.register_hook(lambda g: g * 0.5)",
            f"{name}.register_hook(lambda g: {note}(g.clone()))",
            f"{name}.register_post_accumulate_grad_hook(lambda p: {note}(p.grad.clone()))",
        ]
    else:
        # PyTorch itself ends in a segmentation fault at a hook on a view whose base was changed in place.
        name = d.pick(lambda value: value.requires_grad and not value.is_leaf and not value._is_view())
        texts = [
            f"{name}.register_hook(lambda g: g * 0.5)",
            f"{name}.register_hook(lambda g: seen.setdefault('{name}', []).append(g.clone()))",
            f"{name}.register_hook(lambda g: g.clamp(-0.1, 0.1))",
            f"{name}.retain_grad(); later.append(lambda: {name}.grad)",
        ]
    d.execute(d.random.choice(texts))


def read(d: Draft) -> None:
    """Data is asked for on the way: numbers, decisions, shapes."""
    name, other = d.pick(lambda value: value.ndim >= 1), d.pick()
    size = d.shape(name)[0]
    texts = (
        f"{name} * 2 if {other}.mean() > 0 else {name} - 1",
        f"{name} * {other}.max().item()",
        f"{name} + float({other}.sum()) * 0.1",
        f"{name} * (1 + len({other}.reshape(-1).tolist()))",
        f"{name}[{name} > 0.1].sum() * 0.1",
        f"{name}[{name}.reshape({size}, -1)[:, 0] > 0]",
        f"{name}[({other}.reshape(-1) > 0).nonzero()[:, 0] % {size}]",
        f"torch.stack([row * 0.5 for row in {name}])",
        f"sum(row.sum() for row in {name})",
        f"{name} + torch.from_numpy({other}.detach().numpy().copy()).mean()",
        f"{name} * copy.deepcopy({other}.detach()).mean()",
        f"{name} + torch.tensor({other}.mean().item(), dtype=torch.float64)",
        f"{name} * (2.0 if bool(({other} > 0).any()) else 0.5)",
        f"{name}[int({other}.abs().sum()) % {size}]",
        f"{name}[:int({other}.abs().sum()) % {size} + 1]",
    )
    d.assign(d.random.choice(texts))


def draw(d: Draft) -> None:
    """Random numbers of eager code between recorded ones, seeds, forks."""
    name = d.pick(lambda value: value.ndim >= 1)
    new, shape = f"v{d.count}", list(d.shape(name))
    texts = (
        "torch.rand(2)",
        "torch.manual_seed(7)",
        f"{new} = {name} + torch.randn({shape}, dtype=torch.float64)",
        f"with torch.random.fork_rng(devices=[]): {new} = F.dropout({name}, 0.5, True)",
        "with torch.random.fork_rng(devices=[]): torch.rand(3)",
        f"{new} = {name} * torch.randint(0, 3, {shape})",
        f"{new} = {name} + {name}.detach().clone().normal_()",
        f"{new} = F.dropout(F.dropout({name}, 0.2, True), 0.3, True)",
        f"{new} = {name}[torch.multinomial(w, 2, True) % {shape[0]}]",
        f"{new} = F.rrelu({name}, 0.1, 0.3, True)",
        f"{new} = {name} + torch.poisson({name}.detach().abs())",
    )
    text = d.random.choice(texts)
    made = new in text
    d.execute(text, *([new] if made else []))
    d.count += made


def gradient(d: Draft) -> None:
    """Gradients on the way, and values that have none."""
    name = d.pick(lambda value: value.requires_grad)
    leaf = _leaf(d)
    create = d.random.choice((True, False))
    new = f"v{d.count}"
    texts = (
        f"{new} = torch.autograd.grad({name}.square().sum(), {leaf}, retain_graph=True, create_graph={create})[0]",
        f"{new} = {d.pick()} * torch.autograd.grad({name}.sum(), {leaf}, create_graph=True)[0].mean()",
        f"with torch.no_grad(): {new} = {name} * 2",
        f"{new} = {name}.detach() * {name}",
        f"{new} = Scaled.apply({name}, 0.7)",
        f"{new} = checkpoint(lambda v: (v * 2).tanh(), {name}, use_reentrant=False)",
    )
    d.execute(d.random.choice(texts), new)
    d.count += 1


def buffer(d: Draft) -> None:
    """A buffer that is read, updated under `no_grad`, and read again."""
    name = d.pick(lambda value: value.ndim >= 1)
    width = d.shape(name)[-1]
    kept = d.add("r", d.normal((width,)))
    d.assign(f"{name} + {kept}")
    texts = (
        f"{kept}.mul_(0.9)",
        f"{kept}.add_({name}.detach().reshape(-1, {width}).mean(0), alpha=0.1)",
        f"{kept}.copy_({name}.detach().reshape(-1, {width})[0])",
        f"{kept}[0] = 0.5",
        f"{kept}.lerp_({name}.detach().reshape(-1, {width}).mean(0), 0.1)",
    )
    d.execute(f"with torch.no_grad(): {d.random.choice(texts)}", kept)
    if d.random.random() < 0.6:
        d.assign(f"{name} * {kept}")


def train(d: Draft) -> None:
    """Backward passes in the middle of a program, gradients that are read there, and parameters that change."""
    name = d.pick(lambda value: value.requires_grad)
    leaf = _leaf(d)
    texts = (
        f"{name}.square().mean().backward(retain_graph=True)",
        f"({name} * 0.5).sum().backward()",
        f"{leaf}.grad = None",
        f"{leaf}.grad = None if {leaf}.grad is None else {leaf}.grad * 0.5",
        f"with torch.no_grad(): {leaf}.mul_(0.9)",
        f"{leaf}.data = {leaf}.data * 0.9",
        f"{leaf}.data.mul_(0.9)",
        f"torch.optim.SGD([{leaf}], 0.1).step()",
        f"torch.nn.utils.clip_grad_norm_([{leaf}], 0.1)",
        f"{leaf}.requires_grad_(False)",
        f"{leaf}.requires_grad_(True)",
    )
    d.execute(d.random.choice(texts))


def transform(d: Draft) -> None:
    """Functions of functions, and forms of calls that few people use."""
    name = d.pick(lambda value: value.ndim >= 2)
    texts = (
        f"torch.vmap(lambda row: (row * 2).sum())({name})",
        f"torch.vmap(torch.sin, in_dims=1)({name})",
        f"torch.func.grad(lambda v: v.square().sum())({name})",
        f"torch.func.vjp(torch.tanh, {name})[0]",
        f"torch.utils.checkpoint.checkpoint(torch.sigmoid, {name}, use_reentrant=True)",
        f"torch.autograd.functional.jacobian(lambda v: v.sum(0), {name}.detach()).sum(0)",
        f"getattr({name}, 'T' if {name}.ndim == 2 else 'mT')",
        f"torch.Tensor.mul({name}, {name})",
        f"torch.ops.aten.add.Tensor({name}, {name})",
        f"{name}.__radd__(1.0)",
        f"sum([{name}, {name}])",
        f"torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Flatten(0))({name})",
        f"torch.stack(list({name}))",
        f"torch.stack([*{name}], -1)",
        f"{name}.new_tensor({name}.detach()[0].tolist())",
        f"{name}.type_as({name}).to({name}.device, copy=True)",
        f"max({name}.reshape(-1)[:3])",
    )
    d.assign(d.random.choice(texts))


HABITS: tuple[tuple[Callable[[Draft], None], float], ...] = (
    (alias, 5),
    (metadata, 2),
    (out, 1),
    (hook, 4),
    (read, 5),
    (draw, 5),
    (gradient, 3),
    (buffer, 2),
    (train, 2),
    (transform, 2),
)
"""Which habit comes how often, beside the operators."""
