"""`koila doctor`, `koila report`, and the command itself."""

from __future__ import annotations

import tomllib
import webbrowser
from importlib import metadata
from pathlib import Path

import pytest
import torch

import koila
from koila.cli import doctor, exits
from koila.cli.main import main, make_parser

ROOT = Path(__file__).resolve().parents[2]


def test_the_doctor_finds_that_koila_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == exits.OK
    shown = capsys.readouterr().out
    assert shown.endswith("koila works here\n")
    for text in ("[ok] self-test", "[ok] versions", "[ok] device", "[ok] memory", "malloc", "[ok] backend", "package"):
        assert text in shown


def test_without_extras_the_doctor_says_what_to_install_for_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert main(["doctor"]) == exits.OK
    shown = capsys.readouterr().out
    for extra, packages in doctor.EXTRAS.items():
        for package, purpose in packages.items():
            assert f'[--] package      {package} is not installed: {purpose}; pip install "koila[{extra}]"' in shown
    assert "inductor needs a C++ compiler: apt install g++" in shown


def test_the_doctor_looks_at_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KOILA_BUDGET", "2G")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert main(["doctor"]) == exits.OK
    shown = capsys.readouterr().out
    assert "[!!] budget       KOILA_BUDGET='2G' cannot be read: 'G' is not a unit of memory" in shown
    assert "[ok] malloc       MALLOC_MMAP_THRESHOLD_=1048576" in shown


def test_a_koila_that_does_not_work_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "allclose", lambda *args, **kwargs: False)
    assert main(["doctor"]) == exits.FAILED
    assert "[!!] self-test    a gradient in chunks differs from eager's" in capsys.readouterr().out


def test_the_doctor_knows_the_extras_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name in doctor.EXTRAS}
    assert {name: sorted(packages) for name, packages in doctor.EXTRAS.items()} == {
        name: sorted(package.partition(">")[0] for package in packages) for name, packages in extras.items()
    }


def test_a_saved_report_is_printed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with koila.budget(chunk_size=2):
        (koila.lazy(torch.ones(4, 3)) * 2).sum().item()
    saved, page = tmp_path / "run.json", tmp_path / "run.html"
    koila.last_report().save(saved)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["report", "--open", "--html", str(page), str(saved)]) == exits.OK
    shown = capsys.readouterr().out
    assert shown.startswith("split: 4 samples in ") and shown.endswith(f"page: {page}\n")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and opened == [page.resolve().as_uri()]


def test_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    assert main(["report", str(path)]) == exits.USAGE
    path.write_text("{}", encoding="utf-8")
    assert main(["report", str(path)]) == exits.USAGE
    shown = capsys.readouterr().err
    assert "cannot be read: No such file" in shown and "is no saved report" in shown and "Traceback" not in shown


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, page = tmp_path / "run.json", tmp_path / "run.html"
    koila.last_report().save(saved)
    page.mkdir()
    assert main(["report", "--html", str(page), str(saved)]) == exits.USAGE
    assert capsys.readouterr().err.startswith("koila: [Errno 21] Is a directory: ")


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == exits.USAGE
    shown = capsys.readouterr().out
    assert "examples:" in shown
    for command in ("run", "plan", "report", "calibrate"):
        assert f"koila {command} " in shown
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([command, "--help"])
        assert ended.value.code == 0 and "examples:" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"koila {koila.__version__}\n"


def test_a_calibration_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speeds.json"
    assert main(["calibrate", "--size", "32", "--file", str(path)]) == exits.OK
    assert capsys.readouterr().out.endswith(f"{path}\n") and '"cpu"' in path.read_text(encoding="utf-8")
    assert main(["calibrate", "--device", "nowhere", "--file", str(path)]) == exits.USAGE
    assert "there is no device 'nowhere' to measure" in capsys.readouterr().err
