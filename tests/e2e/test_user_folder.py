"""The installed wheel trains in a user's folder, whose modules have the names of Ratchet's parts, on the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.cli.one_round import train_one_round
from tests.harness.cli.user_project import UserProject
from tests.harness.packages import build_wheel, install


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new environment with the wheel."""
    wheel = build_wheel(tmp_path_factory.mktemp("build"))
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


@pytest.mark.e2e
def test_up_serves_and_trains_in_a_users_folder_with_a_judge_that_imports_the_users_modules(
    commands: Path, tmp_path: Path
) -> None:
    train_one_round(UserProject(tmp_path, commands), "shop_judge:judge")


@pytest.mark.e2e
def test_the_demo_trains_in_a_users_folder(commands: Path, tmp_path: Path) -> None:
    project = UserProject(tmp_path, commands)
    try:
        done = project.run("demo", "--rounds", "2", "--held-out-tasks", "4", "--held-out-attempts", "1", seconds=900)
        result = tmp_path / ".ratchet" / "demo" / "result.json"
        assert result.exists(), done.stdout
        figures = json.loads(result.read_text())
    finally:
        project.stop()
    assert done.returncode in (0, 1), done.stdout  # 1: too short for a significant improvement
    assert figures["swaps"] >= 1
    assert figures["failed_calls"] == 0
