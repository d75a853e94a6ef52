"""One program, run eagerly twice and through koila, whole and in chunks.

*Takes* a `Trial`: how to build a fresh program. *Gives* a `Verdict`: what differed, what was run eagerly on the way,
whether the run was cut.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import koila
from koila._torch import RunMode
from koila.capture.pending import recorder
from tests.conformance.alarm import alarm
from tests.conformance.proof import is_proved
from tests.conformance.trees import (
    Difference,
    bit_difference,
    close_difference,
    no_difference,
    stride_difference,
    tensors_of,
    tree_difference,
)

ASKED = {
    "item", "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "__bool__", "__int__", "__float__",
    "__index__", "__complex__", "__array__", "format", "run", "to_tensor", "grad_fn", "pickle", "deepcopy",
    "assignment of a gradient",
}  # fmt: skip
"""What a program does when it asks for data itself."""
SEED = 1234
EAGER_RUNS = 400
"""How often a difference in bits is looked for in eager itself."""


def seed(number: int = SEED) -> None:
    """Seed the CPU's generator; `torch.manual_seed` also queues a seed, with a traceback, for every other device."""
    torch.default_generator.manual_seed(number)


@dataclass(frozen=True)
class Program:
    """A program with its own fresh tensors."""

    inputs: Any
    """A tree; its tensors are made lazy."""
    call: Callable[[Any], Any]
    """From the tree of inputs to a tree of results."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Real tensors that it uses beside the inputs: parameters and buffers."""
    loss: Callable[[Any], Any] | None = None
    """From the results to a scalar; None where nothing is differentiable."""


@dataclass(frozen=True)
class Trial:
    """How to build a program again and again."""

    entry: str
    """The entry of the suite it belongs to."""
    label: str
    """Which of its trials: variant, dtype, number of the sample."""
    build: Callable[[], Program]
    uninitialised: bool = False
    """Whether only the metadata of its results means anything."""
    writes_input: bool = False
    """Whether the program itself writes to one of its real inputs."""


@dataclass
class Verdict:
    """What was seen in one trial."""

    label: str
    wrong: str | None = None
    """How koila's results differ, or how it failed."""
    fell_back: str | None = None
    """What ran eagerly in the middle without the program asking for it."""
    wrote_input: str | None = None
    """What ran at once because the program writes to its own real input, which eager code sees from then on."""
    data_dependent: bool = False
    """Whether a result's shape depends on data, or is a Python value made of data: falling back is the only way."""
    breaks: tuple[str, ...] = ()
    """What the program asked for in the middle, or ran eagerly."""
    strides: str | None = None
    """Results whose strides are not eager's."""
    skipped: str | None = None
    """Why nothing was compared: eager does not run it, or does not repeat itself."""
    num_split: int = 0
    """Runs in chunks."""
    proved: bool = False
    """Whether a result is Sliced, Merged or Uniform."""
    whole: tuple[str, ...] = ()
    """Why runs that should have been cut were not."""


@dataclass
class Seen:
    """What one execution of a program left behind."""

    outputs: Any
    inputs: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]
    generator: torch.Tensor
    """The generator's state after the call."""
    end: torch.Tensor
    """The generator's state after everything."""


def cotangent_loss(outputs: Any) -> Any:
    """A scalar in which every differentiable result has a fixed random weight."""
    generator = torch.Generator().manual_seed(SEED)
    parts = []
    for output in tensors_of(outputs):
        if not output.requires_grad or not (output.is_floating_point() or output.is_complex()):
            continue
        dense = output.to_dense() if output.layout != torch.strided else output
        weight = torch.randn(tuple(dense.shape), dtype=dense.dtype, generator=generator)
        total = (dense * weight).sum()
        parts.append(torch.real(total) if dense.is_complex() else total)
    if not parts:
        return None
    loss = parts[0]
    for part in parts[1:]:
        loss = loss + part
    return loss


def _differentiable(program: Program) -> list[torch.Tensor]:
    candidates = [*tensors_of(program.inputs), *program.state.values()]
    return [tensor for tensor in candidates if tensor.requires_grad and tensor.is_leaf]


def _observe(program: Program, outputs: Any, generator: torch.Tensor) -> Seen:
    gradients = [tensor.grad for tensor in _differentiable(program)]
    return Seen(outputs, tensors_of(program.inputs), program.state, gradients, generator, torch.get_rng_state())


def _backward(program: Program, outputs: Any) -> None:
    loss = None if program.loss is None else program.loss(outputs)
    if loss is not None and loss.requires_grad:
        loss.backward()


def run_eagerly(trial: Trial, backward: bool) -> Seen:
    """The reference."""
    program = trial.build()
    seed()
    outputs = program.call(program.inputs)
    generator = torch.get_rng_state()
    if backward:
        _backward(program, outputs)
    return _observe(program, outputs, generator)


def _lazy_inputs(inputs: Any, batches: Sequence[int | None] | None) -> Any:
    leaves, spec = tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not places:
        return inputs
    dims = tuple(batches) if batches is not None else (None,) * len(places)
    made = koila.lazy(*[leaves[place] for place in places], batch=dims if len(places) > 1 else dims[0])
    for place, lazy in zip(places, made if len(places) > 1 else (made,), strict=True):
        leaves[place] = lazy
    return tree_unflatten(leaves, spec)


def _no_pending(outputs: Any) -> str | None:
    """The shape of a pending value must be that of the real one; checked where it is still pending."""
    for output in tensors_of(outputs):
        if isinstance(output, koila.LazyTensor) and output._value.real is not None:
            real, prepass = output._value.real, output._value.prepass
            if tuple(real.shape) != prepass.shape or real.dtype != prepass.dtype:
                return f"inferred {prepass}, ran as {real.dtype} {list(real.shape)}"
    return None


def run_lazily(trial: Trial, backward: bool, lazy_loss: bool, batches: Sequence[int | None] | None = None) -> Seen:
    """Through koila: results first and then their loss, or the loss lazily too."""
    program = trial.build()
    seed()
    outputs = program.call(_lazy_inputs(program.inputs, batches))
    generator = torch.get_rng_state()
    if lazy_loss:
        if backward:
            _backward(program, outputs)
        real = koila.run(outputs)
    else:
        real = koila.run(outputs)
        if backward:
            _backward(program, real)
    koila.settle()
    difference = _no_pending(outputs)
    if difference is not None:
        raise AssertionError(difference)
    return _observe(program, real, generator)


def difference_between(found: Seen, expected: Seen, compare: Difference, exact: bool) -> str | None:
    """The first difference in results, inputs, state, gradients or generator."""
    pairs: list[tuple[str, Any, Any]] = [
        ("result", found.outputs, expected.outputs),
        ("input", found.inputs, expected.inputs),
        ("state", found.state, expected.state),
        ("gradient", found.gradients, expected.gradients),
    ]
    for name, one, other in pairs:
        difference = tree_difference(one, other, compare)
        if difference is not None:
            return f"{name}{difference}"
    if not torch.equal(found.generator, expected.generator):
        return "generator state after the call"
    return None if torch.equal(found.end, expected.end) or not exact else "generator state at the end"


@contextmanager
def isolated() -> Iterator[None]:
    """koila's counters and pending programs end with the body."""
    koila.metrics.reset()
    try:
        yield
    finally:
        try:
            koila.settle()
        except Exception:
            recorder.forget_effects()
        recorder.new_epoch()


def last_line(error: BaseException) -> str:
    """What a crash says, with the innermost line of koila."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/koila/" in frame.filename]
    where = f" ({frames[-1].filename.split('/koila/')[-1]}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160] if text else ''}{where}"


def counted(prefix: str) -> dict[str, int]:
    """Counters below a prefix, without it."""
    names = [name for name in koila.metrics.counter_names() if name.startswith(prefix + "::")]
    return {name[len(prefix) + 2 :]: koila.metrics.counter_value(name) for name in names}


WRITES_INPUT = {"a write to a real tensor", "a write to what it reads"}


def _note_fallbacks(trial: Trial, verdict: Verdict) -> None:
    reasons = counted("eager_because")
    eager = [f"eager::{name}" for name in counted("eager")]
    forced = [f"forced::{name}" for name in counted("forced") if name not in ("run", "settle")]
    unasked = [name for name in forced if name[len("forced::") :] not in ASKED]
    verdict.breaks = tuple(dict.fromkeys([*verdict.breaks, *eager, *forced]))
    if not eager and not unasked:
        return
    text = ", ".join([*eager, *unasked, *(f"because of {reason}" for reason in reasons)])
    if trial.writes_input and set(reasons) <= WRITES_INPUT and {f"forced::{r}" for r in WRITES_INPUT} >= set(unasked):
        verdict.wrote_input = text
    else:
        verdict.fell_back = text


def depends_on_data(trial: Trial, expected: Seen) -> bool:
    """Whether fake tensors refuse the program because a shape depends on data, or no result is a tensor.

    A function that only looks at data on its way (`gaussian_nll_loss` checks its variances) does not count.
    """
    if not tensors_of(expected.outputs):
        return True
    program = trial.build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            program.call(tree_map_only(torch.Tensor, mode.from_tensor, program.inputs))
    except (DynamicOutputShapeException, GuardOnDataDependentSymNode):
        return True
    except Exception:
        return False
    return False


class _Narrow(RunMode):
    """Notes whether an operator makes float32 out of float64."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wide = any(tensor.dtype == torch.float64 for tensor in tensors_of((args, kwargs)))
        self.found |= wide and any(tensor.dtype == torch.float32 and tensor.ndim for tensor in tensors_of(result))
        return result


@lru_cache(maxsize=4)
def computes_narrow(trial: Trial) -> bool:
    """Whether a program in float64 computes in float32 on the way: float32's tolerance is then its own."""
    program = trial.build()
    with _Narrow() as mode:
        program.call(program.inputs)
    return mode.found


def reference_of(trial: Trial, verdict: Verdict) -> tuple[Seen, bool] | None:
    """Eager's results, twice; None, with the reason noted, where they are no reference."""
    backward = True
    try:
        try:
            first = run_eagerly(trial, True)
        except Exception:
            backward = False
            first = run_eagerly(trial, False)
        second = run_eagerly(trial, backward)
    except Exception as error:
        verdict.skipped = f"eager raises {type(error).__name__}"
        return None
    compare = no_difference if trial.uninitialised else bit_difference
    difference = difference_between(second, first, compare, exact=True)
    if difference is not None:
        verdict.skipped = f"eager does not repeat: {difference}"
        return None
    return first, backward


def _is_one_of_eagers(trial: Trial, backward: bool, found: Seen, expected: Seen) -> bool:
    """Whether eager itself gives other bits in some of many runs, and koila's are as close to them as Rule 1 asks.

    Some kernels give other bits for other bytes in the memory they find: of 36 samples of `linalg.lstsq`, eager has
    other results in 4 where nothing is done in between, and in 9 where freed memory holds other numbers each time.
    """
    if difference_between(found, expected, close_difference, exact=True) is not None:
        return False
    sizes = random.Random(0)
    for _ in range(EAGER_RUNS):
        numbers = [(sizes.randrange(2, 80), sizes.gauss(0, 10)) for _ in range(sizes.randrange(50))]
        used = [torch.full((size,), number, dtype=torch.float64) for size, number in numbers]
        sizes.shuffle(used)
        used.clear()
        if difference_between(run_eagerly(trial, backward), expected, bit_difference, exact=True) is not None:
            return True
    return False


def check_whole(trial: Trial, seconds: float) -> Verdict:
    """The unsplit run: bit-identical."""
    verdict = Verdict(trial.label)
    reference = reference_of(trial, verdict)
    if reference is None:
        return verdict
    expected, backward = reference
    compare = no_difference if trial.uninitialised else bit_difference
    for lazy_loss in (True, False):
        way = "lazy loss" if lazy_loss else "real loss"
        with isolated():
            try:
                with alarm(seconds):
                    found = run_lazily(trial, backward, lazy_loss)
                difference = difference_between(found, expected, compare, exact=True)
                if difference is not None and _is_one_of_eagers(trial, backward, found, expected):
                    verdict.skipped, difference = f"eager does not repeat: {difference}", None
                verdict.wrong = verdict.wrong or _told(way, difference)
                verdict.strides = verdict.strides or tree_difference(found.outputs, expected.outputs, stride_difference)
            except BaseException as error:
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                verdict.wrong = verdict.wrong or _told(way, last_line(error))
            _note_fallbacks(trial, verdict)
    if verdict.fell_back is not None:
        verdict.data_dependent = depends_on_data(trial, expected)
    return verdict


def _told(way: str, difference: str | None) -> str | None:
    return None if difference is None else f"{way}: {difference}"


def chunk_sizes(names: Sequence[str], num_samples: int) -> list[int]:
    """The chunk sizes that really cut a batch; `uneven` leaves a smaller last chunk."""
    found = [num_samples // 2 + 1 if name == "uneven" else int(name) for name in names]
    return list(dict.fromkeys(size for size in found if 0 < size < num_samples))


def check_split(
    trial: Trial,
    batches: Sequence[int | None],
    chunk_size: int,
    seconds: float,
    reference: tuple[Seen, bool],
    prove: bool,
) -> Verdict:
    """One cut: equal up to the order of summation."""
    verdict = Verdict(f"{trial.label} batch={_shown(batches)} chunk={chunk_size}")
    expected, backward = reference
    for lazy_loss in (True, False) if backward else (False,):
        way = "lazy loss" if lazy_loss else "real loss"
        with isolated():
            try:
                with alarm(seconds), koila.budget(chunk_size=chunk_size):
                    found = run_lazily(trial, backward, lazy_loss, batches)
                verdict.wrong = verdict.wrong or _told(way, _split_difference(trial, found, expected))
            except BaseException as error:
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                verdict.wrong = verdict.wrong or _told(way, last_line(error))
            _note_fallbacks(trial, verdict)
            verdict.num_split += koila.metrics.counter_value("runs::split")
            verdict.whole = tuple(dict.fromkeys([*verdict.whole, *counted("fallback")]))
    if verdict.fell_back is not None:
        verdict.data_dependent = depends_on_data(trial, expected)
    if prove:
        with isolated():
            verdict.proved = _proof(trial, batches, seconds)
    return verdict


def _split_difference(trial: Trial, found: Seen, expected: Seen) -> str | None:
    compare = no_difference if trial.uninitialised else close_difference
    difference = difference_between(found, expected, compare, exact=False)
    if difference is not None and "differ by" in difference and computes_narrow(trial):
        return difference_between(found, expected, partial(close_difference, narrow=True), exact=False)
    return difference


def _proof(trial: Trial, batches: Sequence[int | None], seconds: float) -> bool:
    program = trial.build()
    try:
        with alarm(seconds):
            seed()
            return is_proved(program.call(_lazy_inputs(program.inputs, batches)))
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return False


def _shown(batches: Sequence[int | None]) -> str:
    return ",".join("-" if dim is None else str(dim) for dim in batches)
