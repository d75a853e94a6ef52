"""The HTML page in a real browser: it renders, hovers, filters, keeps the console empty, runs no foreign script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import koila
from koila.reporting.page import page
from koila.reporting.view import Alternative, Part, Point, Row, View
from tests.browser.driver import MISSING, REASON, Browser, browser

pytestmark = pytest.mark.skipif(MISSING is not None, reason=REASON)

SCRIPT = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


def explained(path: Path) -> None:
    """The page of a program whose file has a script in its name."""
    source = "def forward(model, x):\n    return model(x).square().mean()\n"
    names: dict[str, Any] = {"__name__": SCRIPT}
    exec(compile(source, f"{path.parent}/{SCRIPT}.py", "exec"), names)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model.add_module(SCRIPT.replace(".", ""), nn.Tanh())
    loss = names["forward"](model, koila.lazy(torch.randn(16, 32)))
    koila.explain(loss, backward=True, budget="32KiB", html=path)


def open_page(window: Browser, path: Path) -> None:
    window.resize(1100, 900)
    window.open(path.as_uri())


def assert_harmless(window: Browser) -> None:
    assert window.run("return window.harmed === undefined")
    assert window.run("return document.querySelectorAll('img, link, iframe, script[src]').length") == 0
    assert window.messages() == []


def test_it_renders_and_runs_no_script_of_the_program(window: Browser, tmp_path: Path) -> None:
    explained(tmp_path / "explain.html")
    open_page(window, tmp_path / "explain.html")
    shown = "return [...document.querySelectorAll('section')].filter((s) => !s.hidden).map((s) => s.id)"
    assert window.run(shown) == ["memory", "curve", "program"]
    assert window.run("return document.querySelectorAll('#areas polygon').length") >= 3
    assert SCRIPT in window.run("return document.getElementById('rows').textContent")
    assert "32.0 KiB" in window.run("return document.getElementById('chart').textContent")
    assert_harmless(window)


def test_pointing_tells_the_step(window: Browser, tmp_path: Path) -> None:
    explained(tmp_path / "explain.html")
    open_page(window, tmp_path / "explain.html")
    place = window.run(
        "const c = document.getElementById('chart'); c.scrollIntoView();"
        "const b = c.getBoundingClientRect(); return [b.left + b.width * 0.6, b.top + 100]"
    )
    assert window.run("return document.getElementById('tip').hidden")
    window.point(*map(int, place))
    tip = window.run("const t = document.getElementById('tip'); return t.hidden ? '' : t.textContent")
    assert "phase" in tip and "largest: " in tip and "KiB" in tip and "activations" in tip
    window.click("#legend label:nth-child(2) input")
    kinds = window.run("return [...document.querySelectorAll('#areas polygon')].map((p) => p.dataset.kind)")
    assert "gradients" not in kinds and "activations" in kinds
    assert_harmless(window)


def test_filters_and_a_narrow_window(window: Browser, tmp_path: Path) -> None:
    explained(tmp_path / "explain.html")
    open_page(window, tmp_path / "explain.html")
    count = "return document.querySelectorAll('#rows tr').length"
    everything = window.run(count)
    window.type("#search", "mm")
    products = window.run(count)
    assert 0 < products < everything
    window.run("const t = document.getElementById('type'); t.value = 'Merged'; t.dispatchEvent(new Event('input'))")
    assert 0 < window.run(count) < products
    window.resize(500, 900)
    window.run("document.documentElement.style.width = '360px'")
    assert window.run("return document.body.scrollWidth <= 500")
    assert_harmless(window)


def large_view(num_nodes: int) -> View:
    points = tuple(
        Point(
            n // 2500, f"aten.op{n}", f"train.py:{n}", {"activations": 1000 + n % 977, "gradients": n}, f"t{n} [4]", ""
        )
        for n in range(num_nodes)
    )
    types = ("Sliced", "Merged", "Whole")
    rows = tuple(
        Row(f"v{n}", f"aten.op{n}", "float32 [4]", 16, types[n % 3], "1", f"train.py:{n}") for n in range(num_nodes)
    )
    return View((Part("phase 1", 1), Part("phase 2", 1)), points, rows, (Alternative(None, 10**6, 1.0, "whole", True),))


def test_five_thousand_nodes(window: Browser, tmp_path: Path) -> None:
    (tmp_path / "large.html").write_text(page("large", "text", large_view(5000), 5000))
    open_page(window, tmp_path / "large.html")
    assert "the first 300 are shown" in window.run("return document.getElementById('count').textContent")
    window.type("#search", "op4999")
    assert window.run("return document.querySelectorAll('#rows tr').length") == 1
    window.run("const s = document.getElementById('search'); s.value = ''; s.dispatchEvent(new Event('input'))")
    window.click("#more")
    assert window.run("return document.querySelectorAll('#rows tr').length") == 5000
    assert_harmless(window)
