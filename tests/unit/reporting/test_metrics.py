"""`koila.metrics` and the progress display, fed by hand."""

import builtins
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import koila
from koila import events
from koila.events import ChunkEnd, Fallback, PhaseStart, RunEnd, RunStart, listeners
from koila.reporting import metrics
from koila.reporting.progress import progress

OWN = listeners._listeners
"""koila's own listeners: the reports."""


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    metrics.reset()
    yield
    metrics.reset()


def test_names_are_sorted() -> None:
    for name in ("trie::hit", "eager::add", "forced::item"):
        events.count(name)
        events.sample(name + "_seconds", 1.0)
    assert metrics.counter_names() == ["eager::add", "forced::item", "trie::hit"]
    assert metrics.metric_names() == ["eager::add_seconds", "forced::item_seconds", "trie::hit_seconds"]


def test_counter_values_and_sites() -> None:
    events.count("forced::item", 2, site="train.py:41")
    assert metrics.counter_value("forced::item") == 2
    assert metrics.counter_value("forced::print") == 0
    assert metrics.counter_sites("forced::item") == Counter({"train.py:41": 2})
    assert metrics.counter_sites("forced::print") == Counter()
    assert metrics.counter_names() == ["forced::item"]


def test_metric_data_is_a_copy() -> None:
    events.sample("run::seconds", 2.0)
    before = metrics.metric_data("run::seconds")
    events.sample("run::seconds", 4.0)
    assert (before.name, before.total_samples, before.accumulator) == ("run::seconds", 1, 2.0)
    assert [value for _, value in before.samples] == [2.0]
    assert before.percentiles[0.5] == 2.0
    assert metrics.metric_data("run::seconds").accumulator == 6.0


def test_an_unknown_metric_says_which_there_are() -> None:
    events.sample("run::seconds", 2.0)
    with pytest.raises(KeyError, match="no metric 'run::second'; there are: run::seconds"):
        metrics.metric_data("run::second")


def test_the_report_leads_with_what_people_ask() -> None:
    events.count("loose")
    events.count("lazy::linear", 9)
    events.count("trie::hit", 3, site="hidden.py:1")
    events.count("warned::nothing lazy", site="train.py:3")
    events.count("retries", site="train.py:44")
    events.count("sizes::traced: a new call")
    events.count("traces", 2)
    events.count("eager_because::data-dependent shape")
    events.count("eager::sort", site=lambda: "model.py:7")
    events.count("forced::item", 2, site="train.py:41")
    events.count("forced::item", site="train.py:50")
    events.count("fallback::a hook", site="train.py:42")
    events.count("runs", 5)
    events.count("runs::split", 4)
    assert metrics.report().splitlines() == [
        "what ran",
        "  runs: 5",
        "  split: 4",
        "what ran whole although the budget asked for a cut, and why",
        "  a hook: 1",
        "    train.py:42: 1",
        "what was computed before a run was asked for, and where",
        "  item: 3",
        "    train.py:41: 2",
        "    train.py:50: 1",
        "what ran eagerly, where and why",
        "  sort: 1",
        "    model.py:7: 1",
        "  because: data-dependent shape: 1",
        "what was traced and planned, and why again",
        "  traces: 2",
        "  traced: a new call: 1",
        "what ran out of memory and was tried again",
        "  retries: 1",
        "    train.py:44: 1",
        "what was warned about",
        "  nothing lazy: 1",
        "    train.py:3: 1",
        "counters",
        "  (no prefix)",
        "    loose: 1",
        "  lazy",
        "    linear: 9",
        "  trie",
        "    hit: 3",
    ]


def test_a_prefix_that_begins_another_is_its_own_group() -> None:
    for name in ("run::a", "run-x::a", "run::b"):
        events.count(name)
    lines = metrics.report().splitlines()
    assert lines == ["counters", "  run", "    a: 1", "    b: 1", "  run-x", "    a: 1"]


def test_the_report_shows_the_most_frequent_sites_and_sums_the_rest() -> None:
    for line in range(1, 9):
        events.count("forced::item", line, site=f"train.py:{line}")
    lines = metrics.report().splitlines()
    assert lines[2:] == [*(f"    train.py:{line}: {line}" for line in (8, 7, 6, 5, 4)), "    3 more: 6"]


def test_the_report_writes_metrics_in_their_unit() -> None:
    for num_bytes in (1024, 2048):
        events.sample("run::measured_bytes", num_bytes, events.metric_bytes)
    first, second, third = metrics.report().splitlines()
    assert first == "metrics"
    assert second == "  run::measured_bytes: total 3.0 KiB over 2 samples"
    assert third.startswith("    1% 1.0 KiB, ") and third.endswith(", 99% 2.0 KiB")


def test_an_empty_report() -> None:
    assert metrics.report() == "nothing was counted"


def _emit_a_run(num_chunks: int) -> None:
    events.emit(RunStart("gpt", num_nodes=120, num_samples=num_chunks * 4, chunk_size=4, num_phases=1))
    events.emit(PhaseStart(0, num_chunks))
    for index in range(num_chunks):
        events.emit(ChunkEnd(0, index, 4))
    events.emit(Fallback("sort", "no rule"))
    events.emit(RunEnd(2.0, num_chunks))


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse_rich)


@pytest.mark.usefixtures("without_rich")
def test_progress_writes_plain_lines_without_rich(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(always=True):
        _emit_a_run(num_chunks=2)
    _emit_a_run(num_chunks=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "koila: gpt: 120 nodes, 8 samples in chunks of 4, 1 phases",
        "koila: phase 1/1: chunk 1/2",
        "koila: phase 1/1: chunk 2/2",
        "koila: done: 2 chunks in 2 s",
    ]


@pytest.mark.usefixtures("without_rich")
@pytest.mark.parametrize("num_chunks", [25, 100, 1000])
def test_plain_lines_are_few_and_end_with_the_last_chunk(num_chunks: int, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(always=True):
        _emit_a_run(num_chunks)
    lines = capsys.readouterr().err.splitlines()[1:-1]
    assert len(lines) <= 14
    assert lines[-1].endswith(f"chunk {num_chunks}/{num_chunks}")


def test_progress_with_rich_shows_the_run_and_unsubscribes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    with progress(always=True):
        _emit_a_run(num_chunks=3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "gpt: 120 nodes, 12 samples in chunks of 4, 1 phases" in captured.err
    assert "done: 3 chunks in 2 s" in captured.err
    assert listeners._listeners == OWN


def test_progress_unsubscribes_when_the_block_raises() -> None:
    with pytest.raises(RuntimeError, match="inside"), progress(always=True):
        raise RuntimeError("inside")
    assert listeners._listeners == OWN


def test_a_user_s_own_metric_is_reported_from_its_first_sample_on() -> None:
    metric = koila.metrics.Metric("mine::tokens", repr_fn=lambda value: f"{value:.0f} tokens")
    assert metrics.metric_names() == []
    metric.add_sample(3)
    metric.add_sample(4)
    assert metrics.metric_data("mine::tokens").accumulator == 7
    assert "mine::tokens: total 7 tokens over 2 samples" in metrics.report()


def test_two_metrics_of_one_name_are_one_series_in_the_report() -> None:
    first, second = koila.metrics.Metric("mine"), koila.metrics.Metric("mine")
    first.add_sample(1)
    second.add_sample(2)
    assert (first.accumulator, second.accumulator) == (3, 2)
    assert metrics.metric_data("mine").accumulator == 3


def test_reset_forgets_the_samples_of_a_metric_that_is_still_used() -> None:
    metric = koila.metrics.Metric("mine")
    metric.add_sample(1)
    metrics.reset()
    metric.add_sample(5)
    assert metrics.metric_data("mine").accumulator == 5
