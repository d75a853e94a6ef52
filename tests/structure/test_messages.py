"""Misuses, and what koila says: the fact, the user's line where there is one, and a way out, matched by text.

A misuse is a function; the line that it must be told is the one with `# here`. `…` stands for any text.
"""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import koila
import koila.delegates
from koila.integrations.lightning import Budget

Misuse = Callable[[], Any]
HERE = str(Path(__file__).resolve())
LISTED: list[tuple[Misuse, type[BaseException], str]] = []


def says(kind: type[BaseException], text: str) -> Callable[[Misuse], Misuse]:
    """A misuse with the kind of its error or warning and with all that it says; `HERE` is the marked line."""

    def listed(misuse: Misuse) -> Misuse:
        LISTED.append((misuse, kind, inspect.cleandoc(text)))
        return misuse

    return listed


# koila.lazy.


@says(koila.CaptureError, """
    batch sizes differ: [4, 2] has 4 samples, [3] has 3 in dim 0
      at: HERE
      try: say where the batch is, one entry per value: koila.lazy(x, table, batch=(0, None))""")  # fmt: skip
def sizes_differ() -> None:
    koila.lazy(torch.ones(4, 2), torch.ones(3))  # here


@says(koila.CaptureError, """
    batch must be an int, None, or a structure of them, got 'first'
      at: HERE
      try: koila.lazy(x, y, batch=0)""")  # fmt: skip
def batch_is_text() -> None:
    koila.lazy(torch.ones(4), batch="first")  # here


@says(koila.CaptureError, """
    batch=(0,) has no entry for member 1
      at: HERE
      try: batch is an int, None, or a structure like the values: batch=(0, None) or {'labels': 0}""")  # fmt: skip
def batch_is_too_short() -> None:
    koila.lazy(torch.ones(4), torch.ones(4), batch=(0,))  # here


@says(koila.KoilaWarning, """
    batch=3 matches none of the tensors ([4, 2]): they are lazy without a batch, and what is … is never cut
      try: name a dimension that they have: koila.lazy(x, y, batch=0), …""")  # fmt: skip
def batch_that_is_not_there() -> None:
    koila.lazy(torch.ones(4, 2), batch=3)


@says(koila.KoilaWarning, """
    koila.lazy made nothing lazy of a Linear: it passes through as it is
      try: make its inputs lazy: model(koila.lazy(x))""")  # fmt: skip
def lazy_model() -> None:
    koila.lazy(torch.nn.Linear(2, 2))


@says(koila.KoilaWarning, """
    koila.lazy made nothing lazy of a DataLoader: it passes through as it is
      try: make each batch lazy, in the loop: for x, y in loader: x, y = koila.lazy(x, y)""")  # fmt: skip
def lazy_loader() -> None:
    koila.lazy(torch.utils.data.DataLoader([torch.ones(2)]))


@says(koila.KoilaWarning, """
    koila.lazy made nothing lazy of a ndarray: it passes through as it is
      try: make a tensor of it first: koila.lazy(torch.as_tensor(array))""")  # fmt: skip
def lazy_array() -> None:
    koila.lazy(torch.ones(2).numpy())


@says(koila.CaptureError, """
    LazyTensor takes a tensor, got a list
      at: HERE
      try: koila.lazy takes any structure of tensors""")  # fmt: skip
def class_of_a_list() -> None:
    koila.LazyTensor([1.0])  # type: ignore[arg-type]  # here


@says(koila.CaptureError, """
    koila.loader takes something that yields batches, got a Linear
      at: HERE
      try: koila.loader(DataLoader(dataset, batch_size=64)); for one batch, koila.lazy(x, y)""")  # fmt: skip
def loader_of_a_model() -> None:
    koila.loader(torch.nn.Linear(2, 2))  # type: ignore[arg-type]  # here


# Budgets.

ACCEPTED = (
    'accepted are bytes as an int, a text such as "512MiB" (2^20) or "512MB" (10^6), or a share of what is free …'
)


@says(koila.BudgetError, f"""
    budget='2G' cannot be read: 'G' is not a unit of memory
      try: budget="2GiB"; {ACCEPTED}""")  # fmt: skip
def gigabytes_in_short() -> None:
    koila.lazy(torch.ones(2), budget="2G")


@says(koila.BudgetError, f"""
    allowed='512' cannot be read: it has no unit
      try: allowed="512MiB"; {ACCEPTED}""")  # fmt: skip
def no_unit() -> None:
    koila.budget("512")


@says(koila.BudgetError, f"""
    allowed='a lot' cannot be read: it does not begin with a number
      try: allowed="512MiB"; {ACCEPTED}""")  # fmt: skip
def no_number() -> None:
    koila.budget("a lot")


@says(koila.BudgetError, f"""
    allowed=2.5 is not a share in (0, 1]
      try: allowed="512MiB"; {ACCEPTED}""")  # fmt: skip
def share_of_two_and_a_half() -> None:
    koila.budget(2.5)


@says(koila.BudgetError, f"""
    budget=0 leaves nothing to run in
      try: budget="512MiB"; {ACCEPTED}""")  # fmt: skip
def nothing_allowed() -> None:
    koila.lazy(torch.ones(2), budget=0)


@says(koila.BudgetError, f"""
    budget is not a number of bytes but of type bool
      try: budget="512MiB"; {ACCEPTED}""")  # fmt: skip
def budget_is_true() -> None:
    Budget(True)


@says(koila.BudgetError, """
    chunk_size must be a whole number of at least 1, got 0
      try: chunk_size=1, or a byte budget such as "512MiB", for which koila picks the chunk size""")  # fmt: skip
def chunks_of_nothing() -> None:
    koila.budget(chunk_size=0)


@says(koila.BudgetError, """
    both a chunk size (4) and a byte budget (allowed='1GiB'): with bytes, koila picks the chunk size itself
      try: koila.budget("512MiB") or koila.budget(chunk_size=4)""")  # fmt: skip
def chunks_and_bytes() -> None:
    koila.budget("1GiB", chunk_size=4)


@says(koila.BudgetError, """
    reserved=2048 of allowed=1024 bytes leaves nothing to run in
      try: reserve less than 1.0 KiB, or allow more""")  # fmt: skip
def all_reserved() -> None:
    koila.budget("1KiB", reserved="2KiB")


@says(koila.BudgetError, """
    offload='/nowhere/at/all' does not exist
      try: offload=True, which is …; accepted are True, False and a directory to write to""")  # fmt: skip
def offload_to_nowhere() -> None:
    koila.budget("1GiB", offload="/nowhere/at/all")


@says(koila.BudgetError, """
    total=1.0 KiB leaves nothing to run in: … are alive on cpu and 0 B reserved
      try: a total of more than …, or allowed=, which does not count what is alive""")  # fmt: skip
def total_below_what_is_alive() -> None:
    with koila.budget(total="1KiB"):
        koila.lazy(torch.ones(2)).sum().item()


@says(koila.BudgetError, """
    needs … bytes (…) at the smallest, allowed 100 (100 B)
      at: HERE asks for it; at the peak: …
      try: budget=…; koila.explain(value, backward=True) shows what cannot be cut""")  # fmt: skip
def budget_that_cannot_be_met() -> None:
    weight = torch.ones(64, 8, requires_grad=True)
    loss = (koila.lazy(torch.ones(4, 64), budget=100) @ weight).square().mean()
    loss.backward()  # here


@says(koila.KoilaWarning, """
    koila.budget(...) was written but never entered: it limits nothing
      try: with koila.budget(...): around the lines that run, backward() included; or …""")  # fmt: skip
def budget_without_with() -> None:
    koila.budget("1GiB")


@says(koila.KoilaWarning, """
    sum, recorded at … inside the koila.budget(...) of …, runs here, after that scope was closed: its budget does …
      try: move this line into the scope, or give the budget to the inputs: koila.lazy(x, budget=...)""")  # fmt: skip
def scope_that_closes_early() -> None:
    with koila.budget("1GiB"):
        total = torch.sum(koila.lazy(torch.ones(2)))
    total.item()


# Runs, ranges and programs.


@says(koila.CaptureError, """
    samples 2 to 9 of a batch of 4
      at: HERE
      try: 0 <= low <= high <= 4""")  # fmt: skip
def range_beyond_the_batch() -> None:
    koila.lazy(torch.ones(4)).run((2, 9))  # here


@says(koila.CaptureError, """
    a range of the batch is (low, high), got True
      at: HERE
      try: value.run((0, 2)), value.run(detach=True)""")  # fmt: skip
def detach_without_its_name() -> None:
    koila.lazy(torch.ones(4)).run(True)  # type: ignore[arg-type]  # here


@says(koila.CaptureError, """
    a range of the batch was asked for, and no batch is known in []
      at: HERE
      try: value.run(), and slice what it gives; a value that was …""")  # fmt: skip
def range_of_a_scalar() -> None:
    koila.lazy(torch.ones(4)).sum().run((0, 2))  # here


@says(koila.KoilaError, """
    there is nothing to plan: no value is pending
      at: HERE
      try: plan before the value is read; koila.last_report() says what a run did""")  # fmt: skip
def plan_after_the_run() -> None:
    value = koila.lazy(torch.ones(4)) + 1
    value.run()
    koila.plan(value)  # here


@says(koila.StaleInputError, """
    an input of Tensor.add (shape [3]) was changed after the call was recorded and before it ran
      at: recorded at …, run at HERE
      try: koila.run(value), or koila.settle() for all that is pending, before the line that changes …""")  # fmt: skip
def changed_before_it_ran() -> None:
    x = torch.ones(3)
    value = koila.lazy(x) + 1
    torch.add(x, 1, out=x)
    value.run()  # here


@says(koila.StaleInputError, """
    an input of linear (shape [256, 64]) was changed after the call was recorded and before it ran
      at: recorded at …, changed at …, run at HERE
      try: koila.keep(value) before the run that computes it, so that it is kept however large it is""")  # fmt: skip
def too_large_to_be_kept() -> None:
    net, hidden = _step(keep=False)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    hidden.sum().item()  # here


@says(koila.CaptureError, """
    the program has 1 inputs, got 0
      at: HERE
      try: their shapes: [(3,)]""")  # fmt: skip
def program_without_inputs() -> None:
    koila.compile_program(koila.lazy(torch.ones(3)) + 1)()  # here


@says(koila.CaptureError, """
    input 0 is float32[3], got float32[4]
      at: HERE
      try: compile the program again for another shape""")  # fmt: skip
def program_of_another_shape() -> None:
    koila.compile_program(koila.lazy(torch.ones(3)) + 1)(torch.ones(4))  # here


@says(koila.CaptureError, """
    ir_format='svg' is neither 'text' nor 'dot'
      at: HERE
      try: koila.dump_ir(value, "text")""")  # fmt: skip
def format_that_does_not_exist() -> None:
    koila.dump_ir(koila.lazy(torch.ones(3)) + 1, "svg")  # here


@says(koila.CaptureError, """
    cannot write [4] into a lazy tensor of shape [3]
      at: HERE
      try: use set_tensor, which takes any shape""")  # fmt: skip
def write_of_another_shape() -> None:
    koila.lazy(torch.ones(3)).update_from_tensor_out(torch.ones(4))  # here


@says(KeyError, "\"no metric 'speed'; there are: …\"")
def metric_that_does_not_exist() -> None:
    koila.metrics.metric_data("speed")


@says(koila.KoilaError, """
    cannot save to 'run.txt': the name must end in .html or .json
      try: save('run.html')""")  # fmt: skip
def report_of_another_kind() -> None:
    koila.last_report().save("run.txt")


@says(TypeError, "a dimension is a whole number, got None; write map(1), or map(lambda dim: dim + 1)")
def batch_mapped_to_nothing() -> None:
    koila.BatchInfo(0, 4).map(lambda dim: None)  # type: ignore[arg-type, return-value]


# Operators, Functions, delegates.


@says(koila.CaptureError, """
    koila.pure takes a subclass of torch.autograd.Function, got <built-in function len>
      at: HERE
      try: koila.pure(MyFunction), or @koila.pure above the class""")  # fmt: skip
def pure_function() -> None:
    koila.pure(len)  # type: ignore[arg-type]  # here


@says(koila.AnalysisError, """
    a rule belongs to one overload of an operator, got <OpOverloadPacket(op='aten.relu')>
      try: koila.rule(torch.ops.my_library.my_operator.default, "x=b_ -> b_")""")  # fmt: skip
def rule_of_all_overloads() -> None:
    koila.rule(torch.ops.aten.relu, "x=b_ -> b_")


@says(koila.AnalysisError, """
    cannot read the rule 'nonsense': aten.relu.default has the arguments self
      try: one word per tensor argument, then the results: "x=bT w=TK -> bK\"""")  # fmt: skip
def rule_that_says_nothing() -> None:
    koila.rule(torch.ops.aten.relu.default, "nonsense")


@says(koila.DelegateError, """
    no backend 'tpu'; known: eager, inductor…
      try: koila.delegates.register_backend""")  # fmt: skip
def backend_that_does_not_exist() -> None:
    koila.delegates.get_backend("tpu")


@says(koila.DelegateError, """
    cannot lower a Linear: a graph is needed
      try: torch.export.export(module, args), or make_fx""")  # fmt: skip
def lowering_of_a_module() -> None:
    koila.delegates.to_backend("eager", torch.nn.Linear(2, 2), ())  # type: ignore[arg-type]


# What eager says, koila says.


@says(RuntimeError, "Trying to backward through the graph a second time …")
def second_backward() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (koila.lazy(torch.ones(3)) * weight).square().sum()
    loss.backward()
    loss.backward()


@says(RuntimeError, "grad can be implicitly created only for scalar outputs")
def backward_of_a_vector() -> None:
    (koila.lazy(torch.ones(3)) * torch.ones(3, requires_grad=True)).backward()


@says(RuntimeError, "mat1 and mat2 shapes cannot be multiplied (4x3 and 2x2)…")
def shapes_that_do_not_fit() -> None:
    koila.lazy(torch.ones(4, 3)) @ torch.ones(2, 2)


def _step(keep: bool) -> tuple[torch.nn.Module, torch.Tensor]:
    """A training step whose hidden layer takes most of the memory."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    hidden = net[:2](koila.lazy(torch.ones(512, 64), budget="1200KiB" if keep else "700KiB"))
    if keep:
        koila.keep(hidden)
    F.mse_loss(net[2](hidden), torch.zeros(512, 64)).backward()
    return net, hidden


def _line_of(misuse: Misuse) -> str:
    lines, first = inspect.getsourcelines(misuse)
    marked = [number for number, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{HERE}:{first + marked[0]}" if marked else HERE


def _said(misuse: Misuse) -> BaseException:
    """The error or the warning of a misuse."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            misuse()
        except Exception as error:
            return error
    (warning,) = (each for each in caught if issubclass(each.category, koila.KoilaWarning))
    assert warning.filename == HERE
    assert isinstance(warning.message, Warning)
    return warning.message


def test_there_are_forty() -> None:
    assert len(LISTED) >= 40 and len({misuse.__name__ for misuse, *_ in LISTED}) == len(LISTED)


@pytest.mark.parametrize(("misuse", "kind", "text"), LISTED, ids=[misuse.__name__ for misuse, *_ in LISTED])
def test_a_misuse_is_told(misuse: Misuse, kind: type[BaseException], text: str) -> None:
    koila.metrics.Metric("known").add_sample(1.0)
    said = _said(misuse)
    assert type(said) is kind
    expected = re.escape(text.replace("HERE", _line_of(misuse))).replace("…", ".*")
    assert re.fullmatch(expected, str(said), re.DOTALL), f"{said}\n\nwas to be\n\n{text}"


@pytest.mark.parametrize("misuse", [budget_that_cannot_be_met, changed_before_it_ran, too_large_to_be_kept])
def test_the_traceback_of_a_run_fits_a_screen_and_shows_the_users_line(misuse: Misuse) -> None:
    error = _said(misuse)
    shown = traceback.extract_tb(error.__traceback__)
    assert len(shown) <= 12
    assert [frame for frame in shown if f"{frame.filename}:{frame.lineno}" == _line_of(misuse)]


def test_the_advice_about_changed_inputs_works() -> None:
    x = torch.ones(3)
    value = koila.lazy(x) + 1
    koila.run(value)
    torch.add(x, 1, out=x)
    assert value.tolist() == [2.0, 2.0, 2.0]
    other = koila.lazy(x) + 1
    koila.settle()
    torch.add(x, 1, out=x)
    assert other.tolist() == [3.0, 3.0, 3.0]


def test_the_advice_about_values_that_were_not_kept_works() -> None:
    net, hidden = _step(keep=True)
    before = net[:2](torch.ones(512, 64)).detach()  # type: ignore[index]
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert torch.allclose(hidden.run(), before)
