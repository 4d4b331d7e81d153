"""A test that fails once and passes alone is told loudly; one that fails twice, or many that fail, fail the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import suite

_UNSTEADY = """
import pathlib

def test_unsteady():
    ran = pathlib.Path(__file__).with_name("ran")
    before = ran.exists()
    ran.touch()
    assert before, "the first time"
"""
_WRONG = "def test_wrong():\n    assert False\n"
_MANY_WRONG = _UNSTEADY + "".join(f"def test_{number}():\n    assert False\n" for number in range(suite.FEW))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own, whose pytest starts quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    (tmp_path / "pytest.ini").touch()
    return tmp_path


def _part(folder: Path, text: str, name: str = "test_told.py") -> list[str]:
    (folder / name).write_text(text)
    return [name]


def test_a_test_that_passes_alone_is_told_with_its_first_failure(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert suite.run([_part(folder, _UNSTEADY)], folder) == 0
    last = capfd.readouterr().out.rpartition("UNSTEADY TESTS (1)")
    assert "test_told.py::test_unsteady" in last[2]
    assert "the first time" in last[0].rpartition("its first failure was")[2]


def test_a_test_that_fails_twice_fails_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.run([_part(folder, _UNSTEADY + _WRONG)], folder) == 1
    out = capfd.readouterr().out
    assert "FAILED twice: test_told.py::test_wrong" in out
    assert "UNSTEADY" not in out


def test_many_failures_fail_at_once_and_the_next_part_runs_all_the_same(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [_part(folder, _MANY_WRONG), _part(folder, "def test_next(): pass", "test_next.py")]
    assert suite.run(parts, folder) == 1
    out = capfd.readouterr().out
    assert "SECOND LOOK" not in out
    assert "1 passed" in out
