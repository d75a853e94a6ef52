"""measured ≤ projected ≤ allowed, on programs nobody tuned for: `./scripts/bench memory`.

*Takes* the programs of `benchmarks.programs`. *Gives* a table of every program at budgets of 100, 50, 33, 25 and 10 %
of eager's peak, at the smallest accepted one and at the peak of each peer, in `benchmarks/results/`, with a plot.

Peaks are by the malloc hook, above the state before the step, gradients included. Times are ratios to eager's step,
interleaved with it in one process without the hook.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.programs import PROGRAMS
from benchmarks.ways import OFFLOAD, Peaks, Refusal, Subject, Way, peers, time_ratios
from benchmarks.witness import WitnessError, call_outside

RESULTS = Path(__file__).with_name("results")
MIB = 2**20
SHARES = (1.0, 0.5, 0.33, 0.25, 0.1)
ASKED: dict[str, tuple[float, ...]] = {"gpt": (70 * MIB, 42 * MIB), "head": (62 * MIB,), "resnet50_batchnorm": (0.4,)}
"""Further budgets: bytes, or a share of eager's peak."""
OFFLOADED = {"cnn_batchnorm": (0.1,), "resnet18_batchnorm": (0.1,), "resnet50_batchnorm": (0.25, 0.1)}
"""Shares at which values may also go into files."""
FORCING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables that make a processor pass for another one."""
COLUMNS = (
    *("way", "budget", "allowed", "projected", "outside", "no arena"),
    *("inside", "difference", "time", "no arena", "verdict"),
)
EXACT = 1e-9
"""In float64 a step is this close to eager's, or it computes something else."""
BAND = 1.03
"""Differences below this are noise."""


@dataclass(frozen=True)
class Cell:
    """A way to run a program, measured."""

    program: str
    way: str
    kind: str
    label: str
    """What the budget is: a share of eager's peak, the smallest, or a peer's peak."""
    allowed_bytes: int | None
    outside_bytes: int | None = None
    inside_bytes: int | None = None
    projected_bytes: int | None = None
    needed_bytes: int | None = None
    difference: float | None = None
    worst_difference: float | None = None
    exact_difference: float | None = None
    file_bytes: int | None = None
    plain_bytes: int | None = None
    """Outside, by the same plan without an arena."""
    seconds: float | None = None
    ratio: float | None = None
    plain_ratio: float | None = None
    """The ratio of the same plan without an arena."""
    verdict: str = ""
    """ok, loose (projected far above measured), refused, or VIOLATION with its reasons."""
    note: str = ""


# In subprocesses.


def measure_program(name: str, compiled: bool, quick: bool, num_threads: int) -> list[dict[str, Any]]:
    """Cells of a program without times; runs under the hook."""
    subject = Subject(name, num_threads)
    found = [_cell(name, subject, Way("eager"), "eager")]
    eager_bytes = found[0].outside_bytes
    assert eager_bytes is not None
    by_hand = peers(subject.program, compiled)
    found += [_cell(name, subject, way, str(way)) for way in (by_hand[:2] if quick else by_hand)]
    budgets = {f"{share:.0%}": int(share * eager_bytes) for share in SHARES}
    for asked in ASKED.get(name, ()):
        share = asked <= 1
        budgets[f"{asked:.0%}" if share else f"{asked / MIB:g} MiB"] = int(asked * eager_bytes if share else asked)
    for cell in found[1:]:
        if cell.outside_bytes is not None and not quick:
            budgets[f"as {cell.way}"] = cell.outside_bytes
    for label, allowed in budgets.items():
        found.append(_cell(name, subject, Way("koila", allowed), label))
    for part in OFFLOADED.get(name, ()):
        found.append(_cell(name, subject, Way(OFFLOAD, int(part * eager_bytes)), f"{part:.0%} offload"))
    found.append(_smallest(name, subject))
    return [asdict(cell) for cell in found]


def _smallest(name: str, subject: Subject) -> Cell:
    """The budget that a refusal names must be accepted; a step of several runs may refuse a later one."""
    refused = _cell(name, subject, Way("koila", 1), "1 byte")
    while refused.needed_bytes is not None:
        named = refused.needed_bytes
        refused = _cell(name, subject, Way("koila", named), "smallest")
        if refused.needed_bytes is not None and refused.needed_bytes <= named:
            verdict = f"VIOLATION: the budget that the refusal named was refused: {refused.note}"
            return Cell(**{**asdict(refused), "verdict": verdict})
    return refused


def _cell(name: str, subject: Subject, way: Way, label: str) -> Cell:
    allowed = int(way.number or 0) if way.is_koila else None
    try:
        found = subject.peaks(way)
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        return Cell(name, str(way), way.kind, label, allowed, verdict=reason)
    if isinstance(found, Refusal):
        clean = "refused" if found.is_clean else "VIOLATION: refused after something ran"
        note = found.message.splitlines()[0]
        return Cell(name, str(way), way.kind, label, allowed, needed_bytes=found.needed_bytes, verdict=clean, note=note)
    numbers = asdict(found)
    wrong, note = _numbers(found, subject, way)
    verdict = _verdict(found, allowed, wrong) if way.is_koila else wrong or "ok"
    if "above" in verdict:
        note = f"beyond the table: {subject.hidden(way)}"
    return Cell(name, str(way), way.kind, label, allowed, **numbers, verdict=verdict, note=note)


def _numbers(found: Peaks, subject: Subject, way: Way) -> tuple[str, str]:
    """What is wrong with the gradients, if anything is, and what they were compared with.

    They are eager's, or not further from those of float64 than eager's own are; or, where rounding decides more than
    that, not further than eager's are for some other data, and exact if all is calculated in float64.
    """
    distance = found.exact_difference
    if distance is None:
        return "", ""
    own = subject.eager_error
    note = f"{distance:.1e} from float64, eager {own:.1e}"
    if distance <= 1.05 * own:
        return "", note
    most, exact = max(subject.eager_errors), subject.difference_in_float64(way)
    wrong = "" if distance <= most and exact <= EXACT else f"gradients differ by {found.difference:.1e}"
    return wrong, f"{note} and up to {most:.1e} for other data; {exact:.1e} apart in float64"


def _verdict(found: Peaks, allowed: int | None, wrong_numbers: str) -> str:
    wrong = [wrong_numbers] if wrong_numbers else []
    limit = found.outside_bytes if allowed is None else allowed
    projected = found.projected_bytes
    if found.outside_bytes > limit:
        wrong.append(f"measured {(found.outside_bytes - limit) / MIB:.2f} MiB above allowed")
    if projected is not None and found.outside_bytes > projected:
        wrong.append(f"measured {(found.outside_bytes - projected) / MIB:.2f} MiB above projected")
    if projected is not None and projected > limit:
        wrong.append("projected above allowed")
    if wrong:
        return "VIOLATION: " + "; ".join(wrong)
    loose = projected is not None and projected > max(1.1 * found.outside_bytes, found.outside_bytes + 2 * MIB)
    return "loose" if loose else "ok"


def measure_times(
    name: str, ways: list[list[Any]], rounds: int, num_threads: int, tuned: bool
) -> dict[str, tuple[float, float, float | None]]:
    """Times of ways; runs without the hook."""
    return time_ratios(name, [Way(kind, number) for kind, number in ways], rounds, num_threads, tuned)


# Outside.


def cells_of(name: str, rounds: int, compiled: bool, quick: bool, num_threads: int, tuned: bool) -> list[Cell]:
    """All cells of a program: peaks in one subprocess, times in another."""
    try:
        measured = call_outside("benchmarks.memory:measure_program", name, compiled, quick, num_threads)
    except WitnessError as error:
        return [Cell(name, "all", "all", "all", None, verdict=f"failed: {_end_of(error)}")]
    found = [Cell(**row) for row in measured]
    return timed(name, found, rounds, num_threads, tuned) if rounds else found


def timed(name: str, found: list[Cell], rounds: int, num_threads: int, tuned: bool) -> list[Cell]:
    """The cells of a program with times, measured in a subprocess."""
    runnable = [cell for cell in found if cell.outside_bytes is not None and cell.kind != "eager"]
    ways = list({cell.way: [cell.kind, _number(cell)] for cell in runnable}.values())
    try:
        times = call_outside("benchmarks.memory:measure_times", name, ways, rounds, num_threads, tuned, hook=False)
    except WitnessError as error:
        times = {}
        found = [*found, Cell(name, "times", "all", "times", None, verdict=f"failed: {_end_of(error)}")]
    return [Cell(**{**asdict(cell), **_times(times.get(cell.way))}) for cell in found]


def _end_of(error: Exception) -> str:
    """What an error says at last, without the folder that this runs in."""
    return " ".join(str(error).replace(f"{Path.cwd()}/", "").split())[-300:]


def _number(cell: Cell) -> float | None:
    if cell.kind in ("koila", OFFLOAD):
        return cell.allowed_bytes
    _, _, number = cell.way.partition(" ")
    return float(number) if number else None


def _times(found: tuple[float, float, float | None] | None) -> dict[str, float | None]:
    return {} if found is None else dict(zip(("seconds", "ratio", "plain_ratio"), found, strict=True))


def winners(cells: Iterable[Cell]) -> list[str]:
    """Peers that are smaller and faster than every point of koila's curve."""
    found = list(cells)
    lines = []
    for peer in found:
        if peer.kind in ("eager", "koila", OFFLOAD, "all") or peer.outside_bytes is None or peer.ratio is None:
            continue
        curve = [c for c in found if c.program == peer.program and c.kind == "koila" and c.ratio is not None]
        as_small = [c for c in curve if (c.outside_bytes or 0) <= BAND * peer.outside_bytes]
        if not any((c.ratio or 0) <= BAND * peer.ratio for c in as_small):
            best = min(as_small, key=lambda c: c.ratio or 0, default=None)
            own = (
                "koila has no point there" if best is None else f"koila {_mib(best.outside_bytes)}, {best.ratio:.2f} ×"
            )
            lines.append(f"{peer.program}: {peer.way} ({_mib(peer.outside_bytes)}, {peer.ratio:.2f} ×); {own}")
    return lines


def _mib(number: int | None) -> str:
    return "" if number is None else f"{number / MIB:.1f} MiB"


def machine(num_threads: int) -> str:
    """What the numbers were measured on."""
    forced = [f"{name}={os.environ[name]}" for name in FORCING if name in os.environ]
    threads = "one thread" if num_threads == 1 else f"{num_threads} threads"
    found = f"torch {torch.__version__}, {threads}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{found} (forced: {' '.join(forced)})" if forced else found


def markdown(cells: list[Cell], not_run: list[str], num_threads: int) -> str:
    """The table, the violations and the peers that win."""
    names = list(dict.fromkeys(cell.program for cell in cells))
    lines = [
        "# Memory and time of programs inside a budget",
        "",
        f"Written by `./scripts/bench memory`; {machine(num_threads)}. Peaks in MiB above the state before the step, "
        "gradients included: outside by the malloc hook, inside by the storage tracker; where values may go into "
        "files, the resident pages of these by the kernel. Difference: of gradients from eager's, "
        "normwise; above 1e-5 they must be as close to those of float64 as eager's own are, for these data "
        "or, if they are exact in float64, for others. Time: ratio to eager's step, interleaved; "
        f"{'CPU time' if num_threads == 1 else 'by the clock'}. No arena: outside and time of the same plan when every "
        "result has memory of its own.",
    ]
    for name in names:
        lines += ["", f"## {name}", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [_row(cell) for cell in cells if cell.program == name]
    violations = [_line(cell) for cell in cells if cell.verdict.startswith("VIOLATION")]
    failures = [_line(cell) for cell in cells if cell.verdict.startswith("failed")]
    timed = any(cell.ratio is not None for cell in cells)
    for title, found in (
        ("Violations", violations),
        ("Failures", failures),
        ("Peers that are smaller and faster than koila's curve", winners(cells) if timed else ["not judged: no times"]),
        ("Not run", not_run),
    ):
        lines += ["", f"## {title}", "", *([f"- {line}" for line in found] or ["none"])]
    return "\n".join(lines) + "\n"


def _line(cell: Cell) -> str:
    note = f" ({cell.note})" if cell.note else ""
    return f"{cell.program}, {cell.way}, {cell.label}: {cell.verdict}{note}"


def _row(cell: Cell) -> str:
    def mib(number: int | None) -> str:
        return "" if number is None else f"{number / MIB:.1f}"

    difference = "" if cell.difference is None or cell.kind == "eager" else f"{cell.difference:.1e}"
    ratio = "1.00" if cell.kind == "eager" else "" if cell.ratio is None else f"{cell.ratio:.2f}"
    plain = "" if cell.plain_ratio is None else f"{cell.plain_ratio:.2f}"
    needs = "" if cell.needed_bytes is None else f", needs {mib(cell.needed_bytes)}"
    needs += "" if cell.file_bytes is None else f", {mib(cell.file_bytes)} of file pages beside it"
    numbers = (cell.allowed_bytes, cell.projected_bytes, cell.outside_bytes, cell.plain_bytes, cell.inside_bytes)
    columns = " | ".join(mib(number) for number in numbers)
    label = "" if cell.label == cell.way else cell.label
    exact = f" ({cell.note})" if cell.exact_difference is not None else ""
    return (
        f"| {cell.kind if label else cell.way} | {label} | {columns} | {difference} | {ratio} | {plain} "
        f"| {cell.verdict}{needs}{exact} |"
    )


STYLES = {
    "koila": "C0o-",
    OFFLOAD: "C5v--",
    "micro-batch": "C1s:",
    "checkpoint": "C2^",
    "linear_cross_entropy": "C3D",
    "compile": "C4x",
}


def _peak(cell: Cell) -> float:
    return (cell.outside_bytes or 0) / MIB


def plot(cells: list[Cell], path: Path) -> None:
    """Time ratio against memory, one picture for each program."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    names = [name for name in PROGRAMS if any(cell.program == name and cell.ratio is not None for cell in cells)]
    if not names:
        return
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for name, axis in zip(names, axes.flat, strict=False):
        own = [cell for cell in cells if cell.program == name and cell.outside_bytes is not None]
        for kind, style in STYLES.items():
            points = sorted((_peak(c), c.ratio) for c in own if c.kind == kind and c.ratio is not None)
            if points:
                axis.plot(*zip(*points, strict=True), style, label=kind)
        eager = next(cell for cell in own if cell.kind == "eager")
        axis.plot([_peak(eager)], [1.0], "k*", label="eager")
        slow = max((cell.ratio or 0 for cell in own), default=0) > 8
        axis.set(title=name, xscale="log", yscale="log" if slow else "linear", xlabel="peak MiB", ylabel="time / eager")
        axis.xaxis.set_minor_formatter(NullFormatter())
        peaks = [_peak(cell) for cell in own]
        axis.set_xticks([min(peaks), max(peaks)], [f"{min(peaks):.0f}", f"{max(peaks):.0f}"])
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def progress(names: list[str]) -> Iterable[str]:
    """The names, with a bar if rich is there."""
    try:
        from rich.progress import track
    except ImportError:
        return names
    return track(names, description="programs")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench memory", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), help="these programs only", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="two peers, no budgets of peers, one round of times")
    parser.add_argument("--rounds", type=int, help="rounds of interleaved steps for the times; 0: none, by default 3")
    parser.add_argument("--times", action="store_true", help="the times alone, of what is in the results already")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    parser.add_argument("--tuned", action="store_true", help="time loops that have tried their plans")
    parser.add_argument("--compile", action="store_true", help="torch.compile with activation_memory_budget, too")
    parser.add_argument("--into", type=Path, default=RESULTS, help="the folder for the results")
    given = parser.parse_args(arguments)
    names = given.only or list(PROGRAMS)
    path = given.into / "memory.json"
    given.into.mkdir(parents=True, exist_ok=True)
    before = [Cell(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []
    done = {name: [cell for cell in before if cell.program == name] for name in PROGRAMS}
    not_run = [] if given.compile else ["torch.compile with activation_memory_budget (`--compile`)"]
    rounds = given.rounds if given.rounds is not None else 1 if given.quick else 3
    for name in progress(names):
        if given.times:
            done[name] = timed(name, done[name], rounds, given.threads, given.tuned)
        else:
            done[name] = cells_of(name, rounds, given.compile, given.quick, given.threads, given.tuned)
        # Written after each program: a run that is cut short keeps what it has.
        cells = [cell for own in done.values() for cell in own]
        path.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n", encoding="utf-8")
        missing = [f"{other}: no numbers yet" for other, own in done.items() if not own]
        (given.into / "memory.md").write_text(markdown(cells, not_run + missing, given.threads), encoding="utf-8")
        plot(cells, given.into / "memory.png")
    print(markdown([cell for name in names for cell in done[name]], not_run, given.threads))
