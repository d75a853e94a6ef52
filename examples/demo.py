"""A model that eager cannot train under a memory limit of its process, trained under it by one line.

Three processes train the same small GPT: eager without a limit (to know the right numbers), eager under a limit, and
koila under the same limit. The memory of each is watched from outside and shown while it runs; then come a table and a
picture. Linux only: other systems do not limit the data of a process.

    ./scripts/demo [--picture memory.svg] [--page report.html]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import koila

ROOM = 400 << 20
"""What the limited processes may allocate above what they hold before training."""
BUDGET = "128MiB"
"""What koila is told; the rest of the room is for what the system's allocator holds back. With 256 MiB the loop
finishes, too, but takes a fifth longer: close to a limit, large blocks come from the system anew in every chunk."""
STEPS = 4
BATCH, CONTEXT, WIDTH, LAYERS, WORDS = 48, 128, 256, 4, 8192
TOLERANCE = 1e-5
"""How far a gradient may be from eager's: float32, and sums in another order."""
PAGE = resource.getpagesize()


# What is trained: an ordinary model and an ordinary loop.


class Block(nn.Module):
    """Attention and a small network, as in GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attention.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.network(self.after(x)))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places(torch.arange(tokens.shape[1]))))


def train(with_koila: bool, room: int, into: Path) -> None:
    """Train a few steps and tell about each on stdout."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = [torch.randint(0, WORDS, (BATCH, CONTEXT + 1)) for _ in range(STEPS)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # So that every process starts from the same memory.
    say(start=data_bytes("self"))
    if room:
        limit = data_bytes("self") + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for number, tokens in enumerate(data):
        started = time.perf_counter()
        x, y = tokens[:, :-1], tokens[:, 1:]
        if with_koila:
            x, y = koila.lazy(x, y, budget=BUDGET)  # The one line.
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if number == 0:
            torch.save([parameter.grad for parameter in model.parameters()], into / "gradients.pt")
        optimizer.step()
        say(step=number + 1, loss=loss.item(), seconds=time.perf_counter() - started)
    if with_koila:
        koila.last_report().save(into / "report.html")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def data_bytes(process: object) -> int:
    """The data of a process, which is what the limit counts."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[5]) * PAGE


# Watching it from outside.


@dataclass
class Watched:
    """One process: what it said, and its memory over time."""

    name: str
    with_koila: bool
    room: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes above those before training)."""
    error: str = ""
    into: Path = Path()

    @property
    def peak(self) -> int:
        return max((size for _, size in self.memory), default=0)

    @property
    def state(self) -> str:
        if self.error:
            return self.error
        return f"step {len(self.losses)} of {STEPS}" if self.losses else "starts" if not self.memory else "step 1"

    def moments(self, usual: list[float]) -> list[float]:
        """When its memory was looked at, in steps; a step that it did not finish takes as long as it usually does."""
        lengths = [*self.seconds, *usual[len(self.seconds) :]]
        found = []
        for moment, _ in self.memory:
            left, steps = moment - self.memory[0][0], 0.0
            for length in lengths:
                steps += min(1.0, max(0.0, left) / length)
                left -= length
            found.append(steps)
        return found

    def run(self, into: Path, show: Any) -> None:
        """Start the process, and look at it until it ends."""
        self.into = into
        into.mkdir()
        command = [sys.executable, __file__, "--train", "koila" if self.with_koila else "eager"]
        command += ["--room", str(self.room), "--into", str(into)]
        log = into / "output.txt"
        with log.open("w") as output, (into / "errors.txt").open("w") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors)
            while process.poll() is None:
                self.look(process.pid, log)
                show()
                time.sleep(0.04)
        self.look(None, log)
        if process.returncode:
            self.error = reason((into / "errors.txt").read_text())
        show()

    def look(self, process: int | None, log: Path) -> None:
        said = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        self.losses = [each["loss"] for each in said if "loss" in each]
        self.seconds = [each["seconds"] for each in said if "loss" in each]
        base = next((each["start"] for each in said if "start" in each), None)
        if process is not None and base is not None:
            with suppress(OSError, IndexError):  # It may have ended since.
                now = data_bytes(process)
                if now:
                    self.memory.append((time.perf_counter(), max(0, now - base)))


def reason(errors: str) -> str:
    """Why a process ended, in a few words."""
    lines = errors.strip().splitlines()
    if any("can't allocate memory" in line for line in lines):
        return "out of memory"
    return lines[-1] if lines else "ended without a word"


# Showing it.


def bar(size: int, room: int, most: int, width: int = 34) -> str:
    """The memory as a bar, with the limit as a line."""
    full, mark = round(width * size / most), round(width * room / most)
    return "".join("│" if place == mark else "█" if place < full else "·" for place in range(width + 1))


@contextmanager
def live(runs: list[Watched], most: int) -> Iterator[Any]:
    """A display that follows the processes: with rich on a terminal, else one line per step."""
    try:
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        Live = None
    if Live is None or not sys.stdout.isatty():
        told: set[str] = set()

        def tell() -> None:
            for run in runs:
                line = f"{run.name}: {run.state}" + (f", loss {run.losses[-1]:.6f}" if run.losses else "")
                if run.memory and line not in told:
                    told.add(line)
                    print(line, flush=True)

        yield tell
        return

    def table() -> Table:
        found = Table(title=f"a GPT, batch of {BATCH}; │ is the limit of {ROOM >> 20} MiB", title_justify="left")
        for name in ("", "", "loss", "memory now", "", "peak"):
            found.add_column(name)
        for run in runs:
            now = run.memory[-1][1] if run.memory else 0
            loss = f"{run.losses[-1]:.4f}" if run.losses else ""
            found.add_row(run.name, run.state, loss, bar(now, ROOM, most), f"{now >> 20} MiB", f"{run.peak >> 20} MiB")
        return found

    with Live(table(), refresh_per_second=12) as shown:
        yield lambda: shown.update(table())


def difference(found: Path, expected: Path) -> float:
    """The largest ‖a − b‖ / ‖b‖ of the gradients of the first step."""
    pairs = zip(torch.load(found / "gradients.pt"), torch.load(expected / "gradients.pt"), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def rows(runs: list[Watched]) -> list[list[str]]:
    found = []
    for run in runs:
        exact = "-" if run.error else f"{difference(run.into, runs[0].into):.1e}" if run is not runs[0] else "0"
        loss = f"{run.losses[-1]:.6f}" if run.losses else run.error
        seconds = f"{min(run.seconds):.1f} s" if run.seconds else "-"
        first = f"{run.seconds[0]:.1f} s" if run.seconds else "-"
        limit = f"{run.room >> 20} MiB" if run.room else "none"
        found.append([run.name, limit, loss, exact, f"{run.peak >> 20} MiB", first, seconds])
    return found


def show_table(runs: list[Watched]) -> None:
    header = ["", "limit", f"loss of step {STEPS}", "gradients off by (step 1)", "peak", "first step", "a step"]
    lines = [header, *rows(runs)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print(
        "  Peak: the data of the process above what it held before training, seen from outside. Times are of this run."
    )


def draw(runs: list[Watched], path: Path) -> bool:
    """The memory of all three over time; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, color in zip(runs, ("#8a93a0", "#c2512f", "#2f6fb5"), strict=True):
        if not run.memory:
            continue
        times, sizes = run.moments(runs[0].seconds), [size / 2**20 for _, size in run.memory]
        axes.plot(times, sizes, color=color, label=run.name, linewidth=1.6)
        if run.error:
            axes.plot(times[-1], sizes[-1], "x", color=color, markersize=10, markeredgewidth=2.5)
            axes.annotate(run.error, (times[-1], sizes[-1]), (6, -14), textcoords="offset points", color=color)
    axes.axhline(ROOM / 2**20, color="#222222", linestyle="--", linewidth=1)
    axes.annotate(f"limit {ROOM >> 20} MiB", (1, ROOM / 2**20), (-4, 4), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right")  # fmt: skip
    axes.set_xlabel("step of training")
    axes.set_xticks(range(STEPS + 1))
    axes.set_ylabel("MiB")
    axes.set_title(f"Memory of the process, a GPT with a batch of {BATCH}", loc="left", fontsize=11)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("memory.svg"), help="where the picture goes")
    parser.add_argument("--page", type=Path, default=Path("report.html"), help="where koila's own report goes")
    parser.add_argument("--train", choices=["eager", "koila"], help=argparse.SUPPRESS)
    parser.add_argument("--room", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train is not None:
        train(chosen.train == "koila", chosen.room, chosen.into)
        return 0
    if sys.platform != "linux":
        print(
            "the demo limits the data of a process, which only Linux does; try examples/exactness.py", file=sys.stderr
        )
        return 2
    return demonstrate(chosen.picture, chosen.page)


def demonstrate(picture: Path, report: Path) -> int:
    runs = [
        Watched("eager, no limit", False, 0),
        Watched("eager, limited", False, ROOM),
        Watched("koila, limited", True, ROOM),
    ]
    with tempfile.TemporaryDirectory() as folder:
        with live(runs, most=3 * ROOM) as show:
            for number, run in enumerate(runs):
                run.run(Path(folder) / str(number), show)
        show_table(runs)
        eager, limited, lazy = runs
        kept = not eager.error and limited.error == "out of memory" and not lazy.error and len(lazy.losses) == STEPS
        kept = kept and difference(lazy.into, eager.into) <= TOLERANCE
        if not lazy.error:
            report.write_text((lazy.into / "report.html").read_text())
            print(f"  koila's report of the last step: {report}")
    if draw(runs, picture):
        print(f"  the picture: {picture}")
    print("every promise was kept" if kept else "A PROMISE WAS BROKEN")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
