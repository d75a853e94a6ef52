"""The operators of random programs, family by family.

*Takes* a `Draft`. *Gives* the table `FAMILIES`: functions that append lines to a draft or raise `Refused`, and how
often each of them is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.property.draft import Draft, Refused, broadcasts

CLASSES = 4
"""How many labels there are."""

UNARY = (
    "{}.relu()",
    "{}.tanh()",
    "{}.sigmoid()",
    "F.gelu({})",
    "F.silu({})",
    "{}.square()",
    "{}.abs()",
    "-{}",
    "{}.sin()",
    "{}.clamp(max=2).exp()",
    "F.softplus({})",
    "{} * 0.5",
    "{} + 1",
    "1 - {}",
    "{}.clamp(-0.7, 0.9)",
    "{}.abs().log1p()",
    "({}.square() + 1).sqrt()",
    "1 / ({}.square() + 1)",
    "{}.sign()",
    "{}.round()",
    "{} ** 3",
    "F.leaky_relu({}, 0.1)",
    "F.elu({})",
    "{}.erf()",
    "{}.clone()",
    "{}.contiguous()",
    "{}.detach()",
    "F.hardswish({})",
    "{}.double()",
    "{}.to(torch.float64)",
    "torch.nan_to_num({})",
    "F.logsigmoid({})",
    "F.threshold({}, 0.1, 0.3)",
    "F.glu({})",
    "F.relu6({})",
    "F.softshrink({}, 0.2)",
    "F.mish({})",
    "{}.frac()",
    "torch.heaviside({}, torch.zeros((), dtype=torch.float64))",
)

BINARY = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "{} / (1 + {}.square())",
    "torch.maximum({}, {})",
    "torch.minimum({}, {})",
    "torch.atan2({}, {}.abs() + 1)",
    "torch.lerp({}, {}, 0.3)",
    "torch.hypot({}, {}.abs() + 1)",
    "torch.add({}, {}, alpha=-2)",
    "torch.where({0} > {1}, {0}, {1})",
    "({0} > {1}).to(torch.float64) * {0}",
    "torch.rsub({}, {})",
    "torch.xlogy({}.abs(), {}.abs() + 1)",
    "torch.logaddexp({}, {})",
    "torch.fmod({}, {}.abs() + 1)",
    "torch.addcmul({0}, {1}, {1}, value=0.5)",
)


def unary(d: Draft) -> None:
    d.assign(d.random.choice(UNARY).format(d.pick()))


def binary(d: Draft) -> None:
    left = d.pick()
    right = d.like(d.shape(left))
    pair = (left, right) if d.random.random() < 0.7 else (right, left)
    d.assign(d.random.choice(BINARY).format(*pair))


def outer_broadcast(d: Draft) -> None:
    """Every sample against every sample, by broadcasting."""
    name = d.pick(lambda value: value.ndim in (1, 2, 3))
    d.assign(d.random.choice(("{0}.unsqueeze(0) - {0}.unsqueeze(1)", "{0}[None] * {0}[:, None]")).format(name))


def linear(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    last, out = d.shape(name)[-1], d.size()
    kind = d.random.randrange(5)
    if kind == 0:
        d.assign(f"{name} @ {d.tensor(last, out)}")
    elif kind == 1:
        d.assign(f"F.linear({name}, {d.tensor(out, last)}, {d.tensor(out)})")
    elif kind == 2:
        d.assign(f"torch.matmul({d.tensor(out, d.shape(name)[0])}, {name})")
    elif kind == 3:
        d.assign(f"F.bilinear({name}, {name}, {d.tensor(out, last, last)})")
    else:
        d.assign(f"torch.addmm({d.tensor(out)}, {name}, {d.tensor(last, out)})")


def products(d: Draft) -> None:
    """Contractions of a value with itself or with one of the same shape."""
    name = d.pick(lambda value: value.ndim in (2, 3, 4))
    same = d.names(lambda value: value.is_floating_point() and tuple(value.shape) == d.shape(name))
    other = d.random.choice(same)
    choices = {
        2: (
            "{} @ {}.T",
            "{}.T @ {}",
            "torch.einsum('bi,bj->bij', {}, {})",
            "torch.einsum('bi,ci->bc', {}, {})",
            "torch.einsum('bi,bi->b', {}, {})",
            "torch.einsum('bi,bj->ij', {}, {})",
            "torch.cdist({}, {} + 1)",
            "F.cosine_similarity({}, {} + 0.1)",
            "torch.einsum('bi,cj->bcij', {}, {})",
            "F.pairwise_distance({}, {} + 0.2)",
        ),
        3: (
            "torch.bmm({}, {}.transpose(1, 2))",
            "{}.transpose(1, 2) @ {}",
            "torch.einsum('bti,bsi->bts', {}, {})",
            "torch.einsum('bti,btj->ij', {}, {})",
            "torch.einsum('bti,bti->b', {}, {})",
            "torch.einsum('bti,cti->bc', {}, {})",
            "F.scaled_dot_product_attention({0}, {1}, {0})",
            "F.scaled_dot_product_attention({0}, {1}, {1}, is_causal=True)",
            "torch.einsum('bti,bsi->ts', {}, {})",
            "torch.tensordot({0}, {1}, dims=([0, 2], [0, 2]))",
        ),
        4: (
            "{} @ {}.transpose(-1, -2)",
            "torch.einsum('bhti,bhsi->bhts', {}, {})",
            "torch.einsum('bhti,bhti->ht', {}, {})",
            "F.scaled_dot_product_attention({0}, {1}, {1})",
        ),
    }
    d.assign(d.random.choice(choices[d.values[name].ndim]).format(name, other))


def view(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    ndim, i, j = d.values[name].ndim, d.dim(name), d.dim(name)
    kind = d.random.randrange(9)
    order = list(range(ndim))
    d.random.shuffle(order)
    low, high = sorted((i % ndim, j % ndim))
    texts = (
        f"{name}.transpose({i}, {j})",
        f"{name}.permute({order})",
        f"{name}.flatten({low}, {high})",
        f"{name}.unsqueeze({i})",
        f"{name}.squeeze({i})",
        f"{name}.squeeze()",
        f"{name}.reshape(-1)",
        f"{name}.movedim({i}, {j})",
        f"{name}.permute({order}).reshape(-1, {d.shape(name)[order[-1]]})",
    )
    d.assign(texts[kind])


def regroup(d: Draft) -> None:
    """Reshapes with literals that multiply or divide the batch."""
    name = d.pick(lambda value: value.ndim >= 1)
    shape = d.shape(name)
    kind = d.random.randrange(5)
    if kind == 0:
        dim = d.random.randrange(len(shape))
        factors = [factor for factor in range(1, shape[dim] + 1) if shape[dim] % factor == 0]
        factor = d.random.choice(factors)
        pair = (factor, shape[dim] // factor) if d.random.random() < 0.5 else (shape[dim] // factor, factor)
        d.assign(f"{name}.unflatten({dim}, {pair})")
    elif kind == 1 and len(shape) >= 2:
        dim = d.random.randrange(len(shape) - 1)
        merged = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        d.assign(f"{name}.reshape({list(merged)})")
    elif kind == 2 and len(shape) >= 2:
        swapped = (shape[1], shape[0], *shape[2:])
        d.assign(f"{name}.reshape({list(swapped)})")
    elif kind == 3:
        d.assign(f"{name}.unsqueeze({d.random.randrange(len(shape) + 1)}).expand({_expanded(d, shape)})")
    else:
        d.assign(f"{name}.reshape({d.batch}, -1)")


def _expanded(d: Draft, shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in (d.size(), *(-1 for _ in shape)))


def pick_part(d: Draft) -> None:
    """Slices and selections, of the batch too."""
    name = d.pick(lambda value: value.ndim >= 1)
    dim = d.dim(name)
    size = d.shape(name)[dim]
    start = d.random.randrange(size)
    stop = d.random.randint(start + 1, size)
    colons = "..., " if dim < 0 else ", ".join([":"] * dim) + (", " if dim else "")
    after = "" if dim >= 0 else "".join(", :" for _ in range(-dim - 1))
    texts = (
        f"{name}[{colons}{start}:{stop}{after}]",
        f"{name}[{colons}::2{after}]",
        f"{name}[{colons}{start}{after}]",
        f"{name}[{colons}-1{after}]",
        f"{name}.narrow({dim}, {start}, {stop - start})",
        f"{name}.flip({dim})",
        f"{name}.roll({d.random.randint(-2, 2)}, {dim})",
        f"{name}.chunk(2, {dim})[0]",
        f"{name}.split({d.random.randint(1, size)}, {dim})[-1]",
        f"{name}.unbind({dim})[{start}]",
        f"{name}.select({dim}, {start})",
        f"{name}.tensor_split(2, {dim})[1]",
        f"{name}.unfold({dim}, {d.random.randint(1, size)}, 1)",
        f"{name}.tril()",
        f"{name}.triu(1)",
        f"{name}.diagonal()",
        f"{name}.index_select({dim}, torch.tensor([{start}, {stop - 1}, {start}]))",
        f"{name}[torch.tensor([{start % d.shape(name)[0]}, 0])]",
    )
    d.assign(d.random.choice(texts))


def join(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    same = d.names(lambda value: value.is_floating_point() and tuple(value.shape) == d.shape(name))
    other, dim = d.random.choice(same), d.dim(name)
    shape = list(d.shape(name))
    texts = (
        f"torch.cat([{name}, {other}], {dim})",
        f"torch.stack([{name}, {other}], {dim})",
        f"torch.cat([{other}, {d.tensor(*shape)}, {name}], {dim})",
        f"{name}.repeat_interleave(2, {dim})",
        f"{name}.repeat({', '.join(str(d.random.choice((1, 1, 2))) for _ in shape)})",
        f"F.pad({name}, (1, 2))",
        f"F.pad({name}, ({', '.join('0' for _ in shape[1:] for _ in '01')}{', ' if len(shape) > 1 else ''}1, 0))",
        f"torch.cat([{name}, {other} * 2]).chunk(2)[1] + {name}",
        f"torch.cat([{name}[1:], {name}[:1]])",
    )
    d.assign(d.random.choice(texts))


REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm")


def reduce(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    dims, keep = d.dims(name), d.random.random() < 0.5
    how = d.random.choice(REDUCTIONS)
    if how == "norm":
        d.assign(f"({name} + 0.1).norm(dim={dims}, keepdim={keep})")
    elif how in ("var", "std"):
        d.assign(f"{name}.{how}({dims}, correction={d.random.choice((0, 1))}, keepdim={keep})")
    else:
        d.assign(f"{name}.{how}({dims}, keepdim={keep})")


def reduce_one(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    dim = d.dim(name)
    texts = (
        f"{name}.max({dim}).values",
        f"{name}.min({dim}).values",
        f"{name}.median({dim}).values",
        f"{name}.prod({dim})",
        f"{name}.max()",
        f"{name}.min()",
        f"{name}.mean()",
        f"{name}.sum()",
        f"{name}.var(correction=0)",
        f"{name} - {name}.mean({dim}, keepdim=True)",
        f"{name} / ({name}.abs().amax({dim}, keepdim=True) + 1)",
        f"({name} > 0).any({dim}).to(torch.float64)",
        f"({name} > 0).all({dim}).to(torch.float64)",
        f"({name} > 0).sum({dim}).to(torch.float64)",
        f"{name}.argmax({dim}).to(torch.float64)",
        f"F.normalize({name} + 0.1, dim={dim})",
        f"torch.std_mean({name}, {dim}, correction=0)[1]",
        f"{name}.argmin({dim}).to(torch.float64)",
        f"{name}.count_nonzero({dim}).to(torch.float64) * 0.5",
        f"{name}.amax()",
        f"{name}.logsumexp({dim}, keepdim=True)",
        f"torch.linalg.vector_norm({name} + 0.1, dim={dim})",
        f"F.one_hot({name}.argmax({dim}), {d.shape(name)[dim]}).to(torch.float64)",
        f"{name}.kthvalue(1, {dim}).values",
    )
    d.assign(d.random.choice(texts))


def soft(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    how = d.random.choice(("softmax", "log_softmax", "softmin"))
    d.assign(f"F.{how}({name}, {d.dim(name)})")


def norm(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 2)
    shape = d.shape(name)
    kind = d.random.randrange(6)
    if kind == 0:
        tail = list(shape[d.random.randrange(1, len(shape)) :])
        d.assign(f"F.layer_norm({name}, {tail}, {d.parameter(*tail)}, {d.parameter(*tail)})")
    elif kind == 1:
        d.assign(f"F.layer_norm({name}, {list(shape[d.random.randrange(len(shape)) :])})")
    elif kind == 2:
        groups = d.random.choice([g for g in range(1, shape[1] + 1) if shape[1] % g == 0])
        d.assign(f"F.group_norm({name}, {groups}, {d.parameter(shape[1])}, {d.parameter(shape[1])})")
    elif kind == 3:
        mean, var = (
            d.add("r", torch.zeros(shape[1], dtype=torch.float64)),
            d.add("r", torch.ones(shape[1], dtype=torch.float64)),
        )
        affine = f"{d.parameter(shape[1])}, {d.parameter(shape[1])}" if d.random.random() < 0.7 else "None, None"
        d.assign(f"F.batch_norm({name}, {mean}, {var}, {affine}, True, {d.random.choice((0.1, 0.3))})")
    elif kind == 4:
        d.assign(f"F.batch_norm({name}, None, None, training=True)")
    else:
        d.assign(d.random.choice((f"F.rms_norm({name}, {list(shape[-1:])})", f"F.instance_norm({name})")))


def convolve(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim in (3, 4))
    shape = d.shape(name)
    two = len(shape) == 4
    dims, out = ("2d" if two else "1d"), d.size()
    kernel = (2,) * (len(shape) - 2)
    mode = d.random.choice(("nearest", "bilinear" if two else "linear"))
    size = ", ".join("2" for _ in kernel)
    texts = (
        lambda: f"F.conv{dims}({name}, {d.parameter(out, shape[1], *kernel)}, {d.tensor(out)}, padding=1)",
        lambda: f"F.conv{dims}({name}, {d.parameter(out, shape[1], *kernel)}, stride=2, padding=1)",
        lambda: f"F.conv{dims}({name}, {d.parameter(shape[1], 1, *kernel)}, groups={shape[1]}, padding=1)",
        lambda: f"F.conv_transpose{dims}({name}, {d.parameter(shape[1], out, *kernel)}, {d.tensor(out)})",
        lambda: f"F.max_pool{dims}({name}, 2, stride=1)",
        lambda: f"F.avg_pool{dims}({name}, 2, stride=1)",
        lambda: f"F.adaptive_avg_pool{dims}({name}, 2)",
        lambda: f"F.adaptive_max_pool{dims}({name}, 1)",
        lambda: f"F.interpolate({name}, scale_factor=2, mode='{mode}')",
        lambda: f"F.unfold({name}, ({size}), padding=1)",
        lambda: f"F.pad({name}, (1, 1), mode='{d.random.choice(('circular', 'replicate'))}')",
        lambda: f"F.pixel_shuffle({name}, 2)",
    )
    d.assign(d.random.choice(texts)())


def embed(d: Draft) -> None:
    index, width = d.random.choice(("y", "t")), d.size()
    texts = (
        f"F.embedding({index}, {d.parameter(CLASSES, width)})",
        f"{d.parameter(CLASSES, width)}[{index}]",
        f"F.one_hot({index}, {CLASSES}).to(torch.float64)",
        f"F.embedding_bag(t, {d.parameter(CLASSES, width)}, mode='{d.random.choice(('sum', 'mean'))}')",
        f"F.embedding({index}, {d.parameter(CLASSES, width)}, padding_idx=1)",
        f"F.embedding({index}, {d.parameter(CLASSES, width)}, scale_grad_by_freq=True)",
        f"{d.parameter(CLASSES, width)}.index_select(0, y)",
        f"torch.bincount(y, minlength={CLASSES}).to(torch.float64)",
        "y.to(torch.float64) * 0.1",
    )
    d.assign(d.random.choice(texts))


def index(d: Draft) -> None:
    """Labels and positions as indices."""
    name = d.pick(lambda value: value.ndim >= 1)
    shape = d.shape(name)
    texts = [
        f"{name}[y % {shape[0]}]",
        f"{name}.index_select(0, y % {shape[0]})",
        f"torch.zeros({CLASSES}, dtype=torch.float64).index_add(0, y, {name}.reshape({shape[0]}, -1)[:, 0])",
        f"{name}.gather(0, ({name} > 0).long() * {shape[0] - 1})",
        f"torch.take_along_dim({name}, {name}.argsort({len(shape) - 1}), {len(shape) - 1})",
    ]
    if len(shape) >= 2:
        labels = f"(y % {shape[1]}).reshape(-1, {', '.join('1' for _ in shape[1:])})"
        texts += [
            f"{name}[torch.arange({shape[0]}), y[:{shape[0]}] % {shape[1]}]",
            f"{name}.gather(1, {labels})",
            f"{name}[:, y % {shape[1]}]",
            f"{name}[torch.arange({shape[0]}).flip(0)]",
            f"{name}[torch.arange({shape[0]})[:, None], torch.arange({min(2, shape[1])})]",
            f"torch.zeros_like({name}).scatter_add(1, {labels}, {name}[:, :1])",
            f"torch.zeros_like({name}).scatter(0, (y[:1] % {shape[0]}).reshape({', '.join('1' for _ in shape)}), 1.0)",
        ]
    d.assign(d.random.choice(texts))


def choose(d: Draft) -> None:
    """where and masked_fill."""
    mask = d.pick_bool()
    name = d.pick(lambda value: broadcasts(d.shape(mask), tuple(value.shape)))
    other = d.like(d.shape(name))
    texts = (
        f"torch.where({mask}, {name}, {other})",
        f"{name}.masked_fill({mask}, 0.0)",
        f"{name}.masked_fill(~{mask}, -1.5)",
        f"{name} * {mask}",
        f"torch.where({mask}, {name}, 0.0)",
        f"torch.where({mask} & ({name} < 1), 0.5, {name})",
    )
    d.assign(d.random.choice(texts))


def scan(d: Draft) -> None:
    """Sums, orders and the like along a dimension, within samples and over the batch."""
    name = d.pick(lambda value: value.ndim >= 1)
    dim = d.dim(name)
    k = d.random.randint(1, d.shape(name)[dim])
    texts = (
        f"{name}.cumsum({dim})",
        f"{name}.sort({dim}).values",
        f"{name}.sort({dim}, descending=True).indices.to(torch.float64)",
        f"{name}.topk({k}, {dim}).values",
        f"{name}.topk({k}, {dim}, largest=False).values",
        f"{name}.gather({dim}, {name}.argsort({dim}))",
        f"{name}.cummax({dim}).values",
        f"{name}.logcumsumexp({dim})",
        f"{name}.topk({k}, {dim}).indices.to(torch.float64)",
        f"{name}.clamp(-1, 1).cumprod({dim})",
        f"{name}.diff(dim={dim})",
        f"torch.msort({name})",
        f"{name}.argsort({dim}).argsort({dim}).to(torch.float64) * 0.1",
    )
    d.assign(d.random.choice(texts))


def noise(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    per_sample = [d.shape(name)[0], *(1 for _ in d.shape(name)[1:])]
    texts = (
        f"F.dropout({name}, 0.3, True)",
        f"F.dropout({name}, 0.5, True)",
        f"{name} + torch.randn_like({name})",
        f"{name} * torch.rand_like({name})",
        f"F.dropout1d({name}, 0.4, True)",
        f"{name} * torch.bernoulli(torch.full_like({name}, 0.5))",
        f"{name}[torch.randperm({d.shape(name)[0]})]",
        f"{name} * torch.rand({per_sample}, dtype=torch.float64)",
        f"F.alpha_dropout({name}, 0.2, True)",
        f"{name} + torch.empty_like({name}).uniform_(-0.1, 0.1)",
    )
    d.assign(d.random.choice(texts))


def write(d: Draft) -> None:
    """In-place operators and slice assignment on an intermediate value."""
    source = d.pick(lambda value: value.ndim >= 1)
    name = d.assign(d.random.choice(("{}.clone()", "{} * 1.5", "{}.sigmoid()", "torch.zeros_like({})")).format(source))
    shape = d.shape(name)
    for _ in range(d.random.randint(1, 3)):
        position = d.random.randrange(shape[-1])
        texts = (
            f"{name}.mul_(0.7)",
            f"{name}.add_({d.like(shape)})",
            f"{name}.relu_()",
            f"{name}[..., {position}] = 0.3",
            f"{name}[..., {position}:] = {d.like((*shape[:-1], shape[-1] - position))}",
            f"{name}[1:] = 0.0",
            f"{name}[0] = {d.like(shape[1:])}",
            f"{name}.masked_fill_({name} > 0.4, 0.2)",
            f"{name} += {d.like(shape)}",
            f"{name}.select(-1, {position}).mul_(2)",
            f"{name}.copy_({d.like(shape)})",
            f"{name}.clamp_(-0.8, 0.8)",
            f"{name}[{name} > 0.5] = 0.1",
            f"{name}[:, {position}:].neg_()",
            f"{name}.transpose(0, -1).add_(0.1)",
            f"{name}.view(-1)[::2] *= 0.5",
            f"{name}[torch.arange({shape[0]}), ..., 0] = 0.25",
            f"{name}[::2].sub_(0.1)",
            f"{name}.tanh_()",
            f"{name}.fill_diagonal_(0.0)",
            f"{name}.index_fill_(0, torch.tensor([0]), 0.4)",
        )
        try:
            d.execute(d.random.choice(texts), name)
        except Refused:
            continue


def flags(d: Draft) -> None:
    name = d.pick(lambda value: value.ndim >= 1)
    other = d.like(d.shape(name))
    texts = (
        f"{name} > {other}",
        f"{name} <= 0.2",
        f"{name}.isfinite()",
        f"({name} > 0) ^ ({other} > 0)",
        "y == 1",
        "t != 0",
        "y[:, None] == y[None, :]",
        f"torch.arange({d.batch}) < {d.batch} - 1",
        f"torch.eye({d.batch}, dtype=torch.bool)",
    )
    d.assign(d.random.choice(texts))


def losses(d: Draft) -> None:
    """The losses of torch.nn, with every reduction."""
    name = d.pick(lambda value: value.ndim >= 1)
    shape = d.shape(name)
    how = d.random.choice(("mean", "sum", "none"))
    other = d.like(shape)
    texts = [
        f"F.mse_loss({name}, {other}.expand_as({name}), reduction='{how}')",
        f"F.smooth_l1_loss({name}, {other}.expand_as({name}), reduction='{how}')",
        f"F.binary_cross_entropy_with_logits({name}, {other}.expand_as({name}).sigmoid(), reduction='{how}')",
        f"F.kl_div(F.log_softmax({name}, -1), F.softmax({other}.expand_as({name}), -1), reduction='{how}')",
        f"F.huber_loss({name}, {other}.expand_as({name}), reduction='{how}')",
        f"F.soft_margin_loss({name}, {other}.expand_as({name}).sign(), reduction='{how}')",
    ]
    if len(shape) >= 2 and shape[0] == d.batch:
        classes = shape[1]
        labels = f"(y % {classes})" + "".join("[..., None]" for _ in shape[2:])
        labels += f".expand({d.batch}, {', '.join(str(size) for size in shape[2:])})" if len(shape) > 2 else ""
        weight = d.constant(classes)
        texts += [
            f"F.cross_entropy({name}, {labels}, reduction='{how}')",
            f"F.cross_entropy({name}, {labels}, {weight}.abs() + 0.1, reduction='{how}', label_smoothing=0.1)",
            f"F.cross_entropy({name}, {labels}, ignore_index=1, reduction='{how}')",
            f"F.nll_loss(F.log_softmax({name}, 1), {labels}, reduction='{how}')",
            f"F.multi_margin_loss({name}, {labels}, reduction='{how}')",
            f"F.cross_entropy({name} @ {name}.T, torch.arange({d.batch}))",
            f"F.triplet_margin_loss({name}, {name}.roll(1, 0), {name}.flip(0), reduction='{how}')",
        ]
    d.assign(d.random.choice(texts))


def several(d: Draft) -> None:
    """Operators with several results, of which more than one is used."""
    name = d.pick(lambda value: value.ndim >= 1)
    dim = d.dim(name)
    kind = d.random.randrange(5)
    first, second = f"v{d.count}", f"v{d.count + 1}"
    calls = (
        f"{name}.chunk(2, {dim})",
        f"{name}.sort({dim})",
        f"{name}.max({dim})",
        f"torch.var_mean({name}, {dim}, correction=0)",
        f"torch.aminmax({name}, dim={dim})",
    )
    d.execute(f"{first}, {second} = {calls[kind]}", first, second)
    d.count += 2
    if not d.values[second].is_floating_point():
        d.assign(f"{second}.to(torch.float64) * 0.3")


def forced(d: Draft) -> None:
    """A value that is read in the middle of the program."""
    name = d.pick()
    d.assign(f"{d.pick()} * {name}.mean().item()")


def recurrent(d: Draft) -> None:
    """A layer of cells over sequences, with or without the batch first."""
    name = d.pick(lambda value: value.ndim == 3)
    first, second, width = d.shape(name)
    batch_first, hidden = d.random.random() < 0.5, d.random.randint(1, 3)
    samples = first if batch_first else second
    kind = d.random.choice(("gru", "lstm", "rnn_tanh", "rnn_relu"))
    gates = {"gru": 3, "lstm": 4}.get(kind, 1) * hidden
    weights = [d.parameter(gates, width), d.parameter(gates, hidden), d.parameter(gates), d.parameter(gates)]
    state = f"torch.zeros(1, {samples}, {hidden}, dtype=torch.float64)"
    states = f"({state}, {state})" if kind == "lstm" else state
    rest = f"[{', '.join(weights)}], True, 1, 0.0, True, False, {batch_first}"
    d.assign(f"torch.{kind}({name}, {states}, {rest})[{d.random.randrange(2)}]")


def algebra(d: Draft) -> None:
    """Small matrices, one for each sample or one in all."""
    name = d.pick(lambda value: value.ndim >= 2 and value.shape[-1] == value.shape[-2])
    size = d.shape(name)[-1]
    eye = f"torch.eye({size}, dtype=torch.float64)"
    regular = f"({name} @ {name}.mT + {eye})"
    texts = (
        f"torch.linalg.det({name})",
        f"torch.linalg.inv({regular})",
        f"torch.linalg.cholesky({regular})",
        f"torch.linalg.solve({regular}, {name})",
        f"torch.linalg.slogdet({regular})[1]",
        f"torch.linalg.matrix_exp({name} * 0.1)",
        f"torch.linalg.matrix_power({name}, 2)",
        f"torch.linalg.eigvalsh({regular})",
        f"torch.linalg.svdvals({regular})",
        f"torch.linalg.qr({regular})[1].abs()",
        f"torch.trace({name}.reshape(-1, {size}, {size})[0])",
        f"torch.linalg.multi_dot([{name}[..., 0, :, :] if {name}.ndim > 2 else {name}, {eye}, {eye}])",
        f"torch.linalg.norm({name} + 0.1, 'fro', dim=(-2, -1))",
        f"torch.linalg.matrix_norm({name} + 0.1, 1)",
        f"torch.kron({name}.reshape(-1, {size}, {size})[0], {eye})",
    )
    d.assign(d.random.choice(texts))


def place(d: Draft) -> None:
    """Values put where indices say, and looked up in tables."""
    name = d.pick(lambda value: value.ndim >= 1)
    shape = d.shape(name)
    size, other = shape[0], d.like(shape)
    labels = f"(y % {size})"
    per_sample = f"(y[:{size}] % {size}).reshape(-1, {', '.join('1' for _ in shape[1:])})".replace(", )", ")")
    source = f"{name}[{labels}]"
    how = d.random.choice(("sum", "prod", "mean", "amax", "amin"))
    texts = (
        f"{name}.index_add(0, {labels}, {source})",
        f"{name}.index_copy(0, torch.arange({size}), {other}.expand_as({name}))",
        f"{name}.index_put((y[:1] % {size},), torch.tensor(0.5, dtype=torch.float64))",
        f"{name}.index_put(({labels},), {source}, accumulate=True)",
        f"{name}.index_reduce(0, {labels}, {source}, '{d.random.choice(('mean', 'amax', 'amin'))}')",
        f"{name}.scatter_reduce(0, {per_sample}.expand_as({name}), {name} * 0.5, '{how}')",
        f"{name}.masked_scatter({name} > 0.1, {name}.reshape(-1) * 2)",
        f"torch.bucketize({name}, torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)).to(torch.float64)",
        f"torch.searchsorted({name}.detach().sort().values, {name}.detach()).to(torch.float64)",
        f"{name}.put(y[:1], torch.tensor([0.3], dtype=torch.float64))",
        f"{name}.take(y % {name}.numel())",
        f"torch.select_scatter({name}, {name}[0] * 2, 0, {d.random.randrange(size)})",
        f"torch.slice_scatter({name}, {name}[1:] * 2, 0, 1)",
        f"torch.renorm({name} + 0.1, 2, 0, 1.0)",
        f"torch.trapezoid({name}, dim={d.dim(name)})",
        f"{name}.quantile(0.5, dim={d.dim(name)})",
        f"torch.cov({name}.reshape({size}, -1))",
        f"torch.rot90({name}.reshape({size}, -1))",
        f"torch.vander({name}.reshape(-1)[:4])",
        f"torch.combinations({name}.reshape(-1)[:4]).sum(-1)",
        f"torch.block_diag({name}.reshape({size}, -1), {name}.reshape({size}, -1)[:1])",
        f"torch.cartesian_prod({name}.reshape(-1)[:3], {name}.reshape(-1)[:2])",
        f"torch.histc({name}.detach(), 4, -1.0, 1.0)",
        f"torch.cumulative_trapezoid({name}, dim={d.dim(name)})",
    )
    d.assign(d.random.choice(texts))


def complex_numbers(d: Draft) -> None:
    """Through complex values and back."""
    name = d.pick(lambda value: value.ndim >= 1)
    dim = d.dim(name)
    texts = (
        f"torch.fft.fft({name}, dim={dim}).abs()",
        f"torch.fft.rfft({name}, dim={dim}).real",
        f"torch.fft.ifft(torch.fft.fft({name}, dim={dim}), dim={dim}).real",
        f"torch.view_as_real(torch.complex({name}, {name}.sin()))[..., 0]",
        f"(torch.complex({name}, {name} * 0.5) * 1j).imag",
        f"torch.polar({name}.abs() + 0.1, {name}).angle()",
        f"torch.complex({name}, {name}.cos()).conj().abs()",
        f"torch.fft.fft2({name}).imag",
    )
    d.assign(d.random.choice(texts))


FAMILIES: tuple[tuple[Callable[[Draft], None], float], ...] = (
    (unary, 3),
    (binary, 4),
    (outer_broadcast, 0.5),
    (linear, 3),
    (products, 2),
    (view, 4),
    (regroup, 3),
    (pick_part, 3),
    (join, 2),
    (reduce, 3),
    (reduce_one, 3),
    (soft, 2),
    (norm, 3.5),
    (convolve, 3),
    (embed, 1),
    (index, 1.5),
    (choose, 1.5),
    (scan, 2),
    (noise, 1.5),
    (write, 1.5),
    (flags, 0.5),
    (losses, 1),
    (several, 1),
    (recurrent, 0.5),
    (algebra, 1),
    (place, 1.5),
    (complex_numbers, 0.5),
    (forced, 0.15),
)
"""Which family of operators comes how often."""
