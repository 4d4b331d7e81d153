"""The whole circle on the real vLLM: the short run of `make test`, and `ratchet demo` with the claims of the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cli.one_round import train_one_round
from tests.harness.cli.project import Project

ROOT = Path(__file__).parent.parent.parent
ROUNDS = "7"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any], Path]:
    """One short demo: (exit code, what it printed, result.json, its folder)."""
    folder = tmp_path_factory.mktemp("state")
    command = [
        sys.executable, "-m", "ratchet", "demo", "--seed", "3", "--rounds", ROUNDS,
        "--held-out-tasks", "60", "--held-out-attempts", "2", "--state-dir", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    output = done.stdout + done.stderr
    assert (folder / "demo" / "result.json").exists(), output[-4000:]
    return done.returncode, output, json.loads((folder / "demo" / "result.json").read_text()), folder / "demo"


@pytest.mark.e2e
def test_an_unmodified_agent_gets_better_on_tasks_that_it_has_never_seen(demo: Any) -> None:
    code, text, result, _ = demo
    assert re.search(r"^console: http://127.0.0.1:\d+/ui/$", text, re.MULTILINE)
    assert result["held_out_tasks"] == 60
    assert result["held_out_success_before"] <= 0.45
    assert result["held_out_success_after"] > result["held_out_success_before"] + 0.15, text[-4000:]
    assert (code, result["learned"]) == (0, True)


@pytest.mark.e2e
def test_no_call_fails_and_no_trajectory_mixes_versions_while_versions_are_swapped(demo: Any) -> None:
    _, _, result, _ = demo
    assert result["swaps"] >= 3
    assert result["calls"] > 500
    assert result["failed_calls"] == 0
    assert result["mixed_version_trajectories"] == 0
    assert len(result["versions"]) >= 3, "the agent's traffic met several versions"


@pytest.mark.e2e
def test_every_trained_token_is_an_id_that_vllm_returned(demo: Any) -> None:
    _, _, result, _ = demo
    assert result["tokens_trained"] > 1000
    assert result["tokens_trained_from_engine"] == result["tokens_trained"]
    assert 0 < result["mismatch_mean"] < 0.2
    assert result["exact_context_share"] > 0.95


@pytest.mark.e2e
def test_evaluations_are_never_trained(demo: Any) -> None:
    _, _, result, _ = demo
    assert result["dropped"]["eval"] >= 60 * 2


@pytest.mark.e2e
def test_the_demo_leaves_a_curve_and_no_process(demo: Any) -> None:
    _, _, _, folder = demo
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "run").glob("*.pid")) == []


_JUDGE = "def judge(response):\n    return sum(map(ord, response)) % 997 / 997\n"  # differs between any two answers


@pytest.mark.circle
@pytest.mark.e2e
def test_an_agents_calls_become_a_trained_version_that_answers_its_next_calls(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(_JUDGE)
    train_one_round(Project(tmp_path), "scores:judge")
