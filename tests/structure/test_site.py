"""The documentation builds, and every link in it leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not installed (pip install '.[docs]')")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert 'id="koila.lazy"' in page and '<span class="gp">' in page
