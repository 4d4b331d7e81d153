"""The environment of bfcl-eval: what `--setup` may remove."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.tuner.environments.bfcl.virtual_env import EvaluationUnready, set_up


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of it")
    with pytest.raises(EvaluationUnready, match=r"work is not empty and not a virtual environment: .*--environment"):
        set_up(folder)
    assert (folder / "thesis.txt").read_text() == "years of it"
