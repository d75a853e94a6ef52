"""`koila run` and `koila plan` on scripts that do not know koila."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import koila
from koila.cli import exits
from koila.cli.main import main
from tests.cli.conftest import Write

ROOT = Path(__file__).resolve().parents[2]
UNMODIFIED = str(ROOT / "examples" / "unmodified_script.py")

TRAIN = """\
import sys, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)).double()
x, y = torch.randn(24, 8).double(), torch.randint(0, 3, (24,))
for a, b in DataLoader(TensorDataset(x, y), batch_size=12):
    loss = F.cross_entropy(net(a), b)
    loss.backward()
gradients = [p.grad for p in net.parameters()]
kind = type(a).__name__
"""


def globals_after(arguments: list[str]) -> dict[str, object]:
    assert main(arguments) == exits.OK
    return dict(vars(sys.modules["__main__"]))


def test_a_loop_over_a_loader_is_run_in_chunks_with_eagers_numbers(
    script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    plain: dict[str, object] = {}
    exec(TRAIN, plain)
    ours = globals_after(["run", "--budget", "44KiB", script(TRAIN)])
    said = capsys.readouterr().err
    assert plain["kind"] == "Tensor" and ours["kind"] == "LazyTensor"
    assert koila.metrics.counter_value("runs::split") == 2
    for one, other in zip(ours["gradients"], plain["gradients"], strict=True):  # type: ignore[call-overload]
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-14)
    assert said.count("koila: lazy: the batches of the DataLoader") == 1
    assert "[12, 8] float64, batch 12 in dim 0; [12] int64, batch 12 in dim 0" in said
    assert "koila: 2 runs, 2 of them in chunks; at most " in said and " projected of 44.0 KiB allowed" in said


def test_without_a_loader_the_outermost_module_in_train_mode_gets_lazy_inputs(
    script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("""
        import torch
        seen = []
        class Inner(torch.nn.Linear):
            def forward(self, x):
                seen.append(type(x).__name__)
                return super().forward(x)
        class Outer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner(3, 3)
            def forward(self, x, *, scale):
                seen.append(type(scale).__name__)
                return self.inner(x + scale)
        net = Outer()
        net(torch.ones(4, 3), scale=torch.ones(3)).sum().backward()
        net.eval()
        out = net(torch.ones(4, 3), scale=torch.ones(3))
        seen.append(type(torch.nn.MSELoss()(out.detach(), torch.ones(4, 3))).__name__)
    """)
    assert globals_after(["run", path])["seen"] == ["LazyTensor", "LazyTensor", "Tensor", "Tensor", "Tensor"]
    said = capsys.readouterr().err
    assert "lazy: what is passed to Outer at" in said
    assert "[4, 3] float32, batch 4 in dim 0; [3] float32, no batch" in said


def test_it_says_what_is_not_lazy(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("""
        import torch
        from torch.utils.data import DataLoader
        rows = [{"x": torch.ones(3), "name": "one", "where": "here"}] * 4
        for batch in DataLoader(rows, batch_size=2):
            print(batch["x"].sum().item(), batch["name"])
    """)
    assert main(["run", path]) == exits.OK
    caught = capsys.readouterr()
    assert caught.out == "6.0 ['one', 'one']\n" * 2
    assert caught.err.count("not lazy: a str (4 times) in the batches of the DataLoader that is read at") == 1


def test_tensors_inside_of_an_unknown_class_are_lazy_where_a_module_gets_them(
    script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("""
        import torch
        from torch.utils.data import DataLoader
        class Batch:
            def __init__(self, rows):
                self.x = torch.stack(rows)
        net = torch.nn.Linear(3, 1)
        for batch in DataLoader([torch.ones(3)] * 4, batch_size=2, collate_fn=Batch):
            kind = type(net(batch.x)).__name__
    """)
    assert globals_after(["run", path])["kind"] == "LazyTensor"
    said = capsys.readouterr().err
    assert "not lazy: a Batch in the batches of the DataLoader" in said and "lazy: what is passed to Linear" in said


def test_batches_of_dataclasses_named_tuples_and_mappings(script: Write) -> None:
    path = script("""
        import torch
        from collections import UserDict, namedtuple
        from dataclasses import dataclass
        from torch.utils.data import DataLoader
        @dataclass(slots=True)
        class Batch:
            x: torch.Tensor
            name: str
        Pair = namedtuple("Pair", "x y")
        kinds = []
        for make in (lambda x: Batch(x, "one"), lambda x: Pair(x, x), lambda x: UserDict(x=x), lambda x: {"x": [x]}):
            for batch in DataLoader([torch.ones(3)] * 2, batch_size=2, collate_fn=lambda rows: make(torch.stack(rows))):
                x = batch["x"] if hasattr(batch, "keys") else batch.x
                kinds.append((type(batch).__name__, type(x[0]).__name__))
    """)
    kinds = globals_after(["run", "--quiet", path])["kinds"]
    assert kinds == [(name, "LazyTensor") for name in ("Batch", "Pair", "UserDict", "dict")]


def test_quiet_says_nothing(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", script(TRAIN)]) == exits.OK
    assert capsys.readouterr().err == ""


def test_nothing_to_make_lazy_is_said(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", script("print('hello')")]) == exits.OK
    assert "nothing was made lazy: the script read no DataLoader and called no module in train mode" in (
        capsys.readouterr().err
    )


def test_workers_are_left_alone(script: Write) -> None:
    path = script("""
        import torch
        from torch.utils.data import DataLoader
        def collate(rows):
            inner = next(iter(DataLoader([torch.ones(2)], batch_size=1)))
            return torch.stack(rows), torch.tensor(type(inner).__name__ == "Tensor")
        loader = DataLoader([torch.ones(2)] * 4, batch_size=2, num_workers=1, collate_fn=collate)
        seen = [(type(x).__name__, bool(plain)) for x, plain in loader]
    """)
    assert globals_after(["run", "--quiet", path])["seen"] == [("LazyTensor", True)] * 2


def test_the_budget_holds_in_every_thread(script: Write) -> None:
    path = script(TRAIN.replace("for a, b in DataLoader", "def train():\n  global a\n  for a, b in DataLoader").replace(
        "    loss", "      loss").replace("gradients =", "import threading\nworker = threading.Thread(target=train)\n"
        "worker.start()\nworker.join()\ngradients ="))  # fmt: skip
    globals_after(["run", "--quiet", "--budget", "44KiB", path])
    assert koila.metrics.counter_value("runs::split") == 2


def test_batches_may_be_read_in_another_thread(script: Write) -> None:
    path = script("""
        import queue, threading, torch
        from torch.utils.data import DataLoader
        ready = queue.Queue()
        loader = DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=3)
        reader = threading.Thread(target=lambda: [ready.put(x) for x in loader])
        reader.start()
        weight = torch.ones(2, requires_grad=True)
        for _ in range(2):
            (ready.get() * weight).sum().backward()
        reader.join()
    """)
    weight = globals_after(["run", "--quiet", path])["weight"]
    assert weight.grad.tolist() == [30.0, 36.0]  # type: ignore[attr-defined]


def test_a_script_sees_what_python_would_show_it(script: Write) -> None:
    path = script("""
        import os, pickle, sys
        from multiprocessing import get_context
        class Thing:
            pass
        def double(number):
            return 2 * number
        if __name__ == "__main__":
            same = type(pickle.loads(pickle.dumps(Thing()))) is Thing
            seen = (sys.argv[1:], __file__ == os.path.abspath(sys.argv[0]), sys.path[0] == os.path.dirname(__file__))
            with get_context("spawn").Pool(1) as pool:
                doubled = pool.map(double, [21])
    """)
    found = globals_after(["run", "--quiet", path, "--budget", "1", "-x", "--", "run"])
    assert found["seen"] == (["--budget", "1", "-x", "--", "run"], True, True)
    assert found["same"] and found["doubled"] == [42]


def test_a_module_is_run_as_with_python_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "sizes.py").write_text("SIZE = 3\n", encoding="utf-8")
    text = "import sys\nfrom .sizes import SIZE\nprint(__name__, SIZE, sys.argv[1:])\nraise ValueError(SIZE)\n"
    (package / "train.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--quiet", "-m", "project.train", "--lr", "1"]) == exits.FAILED
    caught = capsys.readouterr()
    assert caught.out == "__main__ 3 ['--lr', '1']\n"
    assert f'File "{package / "train.py"}", line 4, in <module>' in caught.err
    assert f"{os.sep}koila{os.sep}" not in caught.err
    assert main(["run", "-m", "project.nothing"]) == exits.USAGE
    assert "koila: there is no module project.nothing" in capsys.readouterr().err


@pytest.mark.parametrize("budget", [[], ["--budget", "1GiB"]])
def test_an_exception_of_the_script_looks_as_pythons(
    script: Write, budget: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("""\
        import torch
        class Net(torch.nn.Module):
            def forward(self, x):
                return x @ torch.ones(9)
        try:
            Net()(torch.ones(2, 3))
        except RuntimeError as error:
            raise KeyError("second") from error
    """)
    assert main(["run", "--quiet", *budget, path]) == exits.FAILED
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n")
    assert f'File "{path}", line 6, in <module>' in shown and f'File "{path}", line 4, in forward' in shown
    assert "The above exception was the direct cause of the following exception" in shown
    assert shown.endswith("KeyError: 'second'\n")
    assert f"{os.sep}koila{os.sep}" not in shown


def test_a_syntax_error_has_no_traceback(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("def (:")
    assert main(["run", path]) == exits.FAILED
    assert capsys.readouterr().err.startswith(f'  File "{path}", line 1')


def test_the_scripts_exit_code_is_kept(script: Write) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--quiet", script("import sys; sys.exit(7)")])
    assert ended.value.code == 7


def test_an_interrupt_ends_the_script(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--quiet", script("raise KeyboardInterrupt")]) == exits.INTERRUPTED
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_a_budget_that_cannot_be_met_is_refused_and_the_one_it_names_is_accepted(
    script: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(TRAIN)
    assert main(["run", "--batch", "-2", "--offload", "--budget", "2KiB", path, "--lr", "3"]) == exits.REFUSED
    first, second, third = [line for line in capsys.readouterr().err.splitlines() if "lazy:" not in line][:3]
    assert first.startswith("koila: needs ") and first.endswith("allowed 2048 (2.0 KiB)")
    assert second.startswith(f"  at: {path}:9 asks for it; at the peak: ")
    words = third.split()
    assert words[:6] == ["try:", "koila", "run", "--batch", "-2", "--offload"]
    assert words[6] == "--budget" and words[8:] == [path, "--lr", "3"]
    assert main(words[2:]) == exits.OK


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.py"], "nowhere.py cannot be read: No such file"),
        ([str(ROOT)], "is a folder; name a file in it"),
        (["--budget", "2G", "x.py"], "--budget='2G' cannot be read: 'G' is not a unit of memory"),
        (["--budget", "0", "x.py"], "--budget=0 leaves nothing to run in"),
        (["--budget", "1.5", "x.py"], "--budget=1.5 is not a share in (0, 1]"),
        (["--offload", "/nowhere/at/all", "x.py"], "offload='/nowhere/at/all' does not exist"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == exits.USAGE
    shown = capsys.readouterr().err
    assert text in shown and "Traceback" not in shown and len(shown.splitlines()) <= 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: script"),
        (["--batch", "first", "x.py"], "argument --batch: invalid int value: 'first'"),
        (["--report", "run.txt", "x.py"], "'run.txt' does not end in .json or .html"),
        (["--report", "/nowhere/run.json", "x.py"], "'/nowhere' is not a folder"),
        (["--bugdet", "1GiB", "x.py"], "unrecognized arguments: --bugdet"),
    ],
)
def test_options_that_do_not_exist(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == exits.USAGE
    assert text in capsys.readouterr().err


# koila plan.


def test_plan_ends_the_script_at_its_first_backward(
    script: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "plan.html")
    path = script(TRAIN + "raise AssertionError('not reached')")
    assert main(["plan", "--budget", "44KiB", "--html", page, path]) == exits.OK
    shown = capsys.readouterr().out
    assert shown.startswith(f"backward() at {path}:9 runs all 12 samples at once, ")
    assert "memory and time of other budgets (estimates):" in shown and "← this one" in shown
    assert Path(page).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert koila.metrics.counter_value("runs") == 0
    assert koila.run(koila.lazy(torch.ones(2)) + 1).tolist() == [2.0, 2.0]


def test_plan_refuses_like_a_run(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--budget", "1KiB", script(TRAIN)]) == exits.REFUSED
    assert "koila: needs " in capsys.readouterr().err


def test_plan_without_a_backward_pass_says_so(script: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", script("pass")]) == exits.FAILED
    assert "the script ended before a backward pass of something lazy" in capsys.readouterr().err


# Under a limit of the process.

LIMITED = """
import os, resource, runpy, sys
import torch, koila
from koila.cli.main import main

script, out, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
pages = int(open("/proc/self/statm").read().split()[5])
limit = pages * resource.getpagesize() + room
arguments = ["--steps", "2", "--batch-size", "768"]

def child(act):
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        try:
            code = act()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            code = 1
        sys.stdout.flush()
        os._exit(code or 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def eagerly():
    sys.argv = [script, *arguments, "--out", out + ".eager"]
    runpy.run_path(script, run_name="__main__")

print("eager", child(eagerly), flush=True)
print("koila", child(lambda: main(["run", "--budget", "24MiB", script, *arguments, "--out", out])), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="RLIMIT_DATA counts mapped memory on Linux only")
def test_a_script_trains_under_a_limit_that_kills_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights as without koila and without a limit."""
    ours, plain = str(tmp_path / "ours.pt"), str(tmp_path / "plain.pt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, UNMODIFIED, ours, str(120 << 20)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "eager 1" in shown.stdout and "can't allocate memory" in shown.stdout, shown.stdout
    assert "koila 0" in shown.stdout, shown.stdout + shown.stderr
    monkeypatch.setattr(sys, "argv", [UNMODIFIED, "--steps", "2", "--batch-size", "768", "--out", plain])
    exec(compile(Path(UNMODIFIED).read_text(), UNMODIFIED, "exec"), {"__name__": "__main__"})
    expected = torch.load(plain)
    for name, tensor in torch.load(ours).items():
        assert (tensor - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
