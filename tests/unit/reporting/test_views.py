"""Views, pages, pictures and saved reports: what they show is what was planned; none of them runs anything."""

from __future__ import annotations

import gc
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import koila
from koila.planning.in_force import forget_decisions
from koila.planning.plan import Plan
from koila.planning.timeline import Moment, Stretch
from koila.reporting.view import MAX_POINTS, View, timeline
from tests.models import language, vision

HARM = "<script>alert(1)</script>"


def language_loss() -> koila.LazyTensor:
    task = language(8, torch.float32, context=8, width=16, heads=2, layers=2, vocabulary=32)
    batch = koila.lazy(*task.batches[0])
    return task.loss(task.logits(batch), batch)


def vision_loss() -> koila.LazyTensor:
    task = vision(6, torch.float32, size=8, channels=4, layers=2)
    batch = koila.lazy(*task.batches[0])
    return task.loss(task.logits(batch), batch)


@pytest.mark.parametrize("make", [language_loss, vision_loss])
@pytest.mark.parametrize("limit", [{"chunk_size": 1}, {"chunk_size": 4}, {"budget": "224KiB"}, {}])
def test_the_peak_of_the_timeline_is_what_is_projected(make, limit) -> None:
    found = koila.explain(make(), backward=True, **limit)
    peak = found.view.peak
    assert peak is not None and peak.num_bytes == found.projected_bytes
    assert found.view.rows and {row.type for row in found.view.rows} >= {"Sliced", "Merged", "Whole"}
    assert any(point.site.partition(":")[0].endswith("models.py") for point in found.view.points)


def test_each_chunk_is_drawn_or_counted() -> None:
    found = koila.explain(vision_loss(), backward=True, chunk_size=4)
    chunks = [part for part in found.view.parts if "chunk" in part.title]
    assert sum(part.times for part in chunks) == 2 * found.num_phases
    assert chunks[0].title == f"phase 1 of {found.num_phases}, first chunk"
    assert chunks[1].title == f"phase 1 of {found.num_phases}, 1 more chunk of 2"


def test_a_long_timeline_keeps_its_peak() -> None:
    moments = tuple(Moment("op", None, (("activations", 1 + (n == 7777)),), None) for n in range(10_000))
    _, points = timeline((Stretch("all", 1, moments),), 0, ())
    assert len(points) <= MAX_POINTS and max(point.num_bytes for point in points) == 2


def test_the_text_says_what_when_how_much_and_why() -> None:
    text = str(koila.explain(language_loss(), backward=True, budget="224KiB"))
    for part in ("runs in ", "memory: at most", "of 224.0 KiB allowed", "the whole batch at once needs", "time: about",
                 "why: chunks of", "at the peak: ", "in this order: 2 phases", "phase 1: ", "phase 2: waits for",
                 "to save time, allow more memory", "models.py:"):  # fmt: skip
        assert part in text, part


def test_the_curve_goes_from_the_program_as_it_is_to_the_smallest_budget(tmp_path: Path) -> None:
    loss = language_loss()
    found = koila.explain(loss, backward=True, budget="224KiB", html=tmp_path / "page.html").view.alternatives
    sizes = [each.projected_bytes for each in found]
    assert sizes == sorted(sizes, reverse=True) and [each.is_chosen for each in found].count(True) == 1
    with pytest.raises(koila.BudgetError) as refused:
        koila.plan(loss, backward=True, budget=1)
    assert sizes[-1] == refused.value.needed_bytes
    assert "memory and time of other budgets" not in str(koila.explain(loss, backward=True, budget="224KiB"))


def test_a_report_is_saved_and_read_again(tmp_path: Path) -> None:
    with koila.budget(chunk_size=3):
        language_loss().backward()
    report = koila.last_report()
    report.save(tmp_path / "run.json")
    again = koila.Report.load(tmp_path / "run.json")
    assert again == report and str(again) == str(report)
    assert again.make_view() == report.make_view() and again.make_view().points
    again.save(tmp_path / "run.html")
    assert "phase 2 of 2, first chunk" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert pickle.loads(pickle.dumps(report)) == report


def test_what_cannot_be_saved_or_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(koila.KoilaError, match=r"the name must end in \.html or \.json\n  try: save\('run\.html'\)"):
        koila.last_report().save("run.txt")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(koila.KoilaError, match=r"is no saved report: .*\n  try: koila\.last_report\(\)\.save"):
        koila.Report.load(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError):
        koila.Report.load(tmp_path / "nowhere.json")


def test_a_whole_run_without_a_budget_has_a_page_that_says_why_there_is_no_picture(tmp_path: Path) -> None:
    (koila.lazy(torch.ones(4, 2)) * 2).sum().item()
    koila.last_report().save(tmp_path / "whole.html")
    text = (tmp_path / "whole.html").read_text(encoding="utf-8")
    assert "no picture: without a budget" in text and "koila.explain(loss, backward=True, html=" in text


def test_a_whole_run_inside_a_budget_has_a_picture(tmp_path: Path) -> None:
    with koila.budget("64MiB"):
        language_loss().backward()
    report = koila.last_report()
    assert report.how == "whole" and [part.title for part in report.make_view().parts] == ["forward", "backward"]
    peak = report.make_view().peak
    assert peak is not None and peak.num_bytes == report.projected_bytes and "models.py:" in peak.largest_site
    report.save(tmp_path / "run.json")
    assert "<svg" in koila.Report.load(tmp_path / "run.json")._repr_html_()


def test_nothing_of_the_program_becomes_html(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(compile("def loss(m, x):\n    return m(x).exp().mean()", f"/tmp/{HARM}.py", "exec"), names)
    loss = names["loss"](nn.Linear(4, 4), koila.lazy(torch.ones(4, 4)))  # type: ignore[operator]
    found = koila.explain(loss, backward=True, chunk_size=2, html=tmp_path / "page.html")
    assert HARM in str(found)
    for text in ((tmp_path / "page.html").read_text(encoding="utf-8"), found._repr_html_()):
        assert HARM not in text
    data = (tmp_path / "page.html").read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    assert any(HARM in each for each in json.loads(data)["texts"])


def test_a_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    koila.explain(language_loss(), backward=True, chunk_size=2, html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "src=" not in text and "href=" not in text
    assert text.count("http") - text.count("http-equiv") == text.count("http://www.w3.org/2000/svg")


def test_notebooks_show_values_plans_and_reports_without_running_them() -> None:
    loss = language_loss()
    before = koila.metrics.counter_value("runs")
    for shown in (loss, koila.plan(loss, backward=True, budget="224KiB"), koila.explain(loss, backward=True)):
        text = shown._repr_html_()
        assert "<pre>" in text and "pending" in repr(loss)
    assert "<svg" in koila.explain(loss, backward=True)._repr_html_()
    plan = koila.plan(loss, backward=True, chunk_size=2).plan
    assert isinstance(plan, Plan) and "chunks of 2" in plan._repr_html_()
    assert koila.metrics.counter_value("runs") == before
    with koila.budget(chunk_size=2):
        loss.backward()
    assert "<svg" in koila.last_report()._repr_html_()


def test_old_reports_do_not_keep_plans_alive() -> None:
    for size in (2, 3):
        with koila.budget(chunk_size=size):
            language_loss().backward()
    first, last = koila.reports()[-2:]
    forget_decisions()
    gc.collect()
    assert last.make_view().points and first.make_view() == View()
