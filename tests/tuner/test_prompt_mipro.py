"""MIPRO, in an environment of its own: DSPy needs another major version of OpenAI's SDK than the other tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.clients.program import client_python
from tests.harness.metadata import write_metadata
from tests.harness.tuner import prompt_world
from tests.harness.tuner.scripted_reflection_model import ScriptedReflectionModel

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of MIPRO's searches in the small world."""
    program = [str(client_python("mipro")), "-m", "tests.harness.tuner.mipro_in_the_small_world"]
    home = tmp_path_factory.mktemp("home")
    metadata = write_metadata(tmp_path_factory.mktemp("metadata"))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{metadata}", "HOME": str(home)}
    with ScriptedReflectionModel().running() as server:
        done = subprocess.run(
            [*program, server.url], capture_output=True, text=True, env=environ, timeout=240, cwd=ROOT
        )
    assert done.returncode == 0, done.stderr
    cases: dict[str, Any] = json.loads(done.stdout)
    return cases | {
        "requests": server.requests,
        "errors": done.stderr,
        "home": sorted(str(one) for one in home.rglob("*")),
    }


def test_mipro_finds_every_rule_that_a_reflection_model_proposes(outcome: dict[str, Any]) -> None:
    assert outcome["whole"]["score"] == 1.0
    assert all(f"a {thing} is a {word}" in outcome["whole"]["prompt"] for thing, word in prompt_world.WORDS.items())
    assert outcome["whole"]["error"] is None


def test_mipro_repeats_its_search_on_recorded_answers(outcome: dict[str, Any]) -> None:
    assert outcome["again"]["error"] is None
    assert outcome["again"]["questions"] == outcome["whole"]["questions"]


def test_mipro_asks_no_model_but_the_reflection(outcome: dict[str, Any]) -> None:
    assert outcome["whole"]["reflections"] > 0
    assert "litellm" not in outcome["imported"]
    assert {request["model"] for request in outcome["requests"]} == {"scripted-reflection"}


def test_mipro_prints_nothing_keeps_no_cache_and_leaves_the_output_of_other_threads(outcome: dict[str, Any]) -> None:
    printed = [f"meanwhile {number}" for number in range(outcome["meanwhile"])]
    assert outcome["errors"].splitlines() == ["not part of the answer", *printed]
    assert len(printed) > 10
    assert outcome["home"] == []


def test_mipro_shows_the_reflection_model_no_validation_task(outcome: dict[str, Any]) -> None:
    requests = str(outcome["requests"])
    assert "(0)" in requests
    assert not [n for n in range(9, 18) if f"({n})" in requests]


def test_mipro_ends_with_the_budget(outcome: dict[str, Any]) -> None:
    assert outcome["budget"]["error"] == "BudgetExceeded"
    assert outcome["budget"]["paid"] <= 30
    assert outcome["tokens"]["error"] == "BudgetExceeded"


def test_mipro_leaves_an_unjudged_rollout_out_of_the_mean(outcome: dict[str, Any]) -> None:
    assert outcome["unjudged"]["error"] is None
    assert outcome["unjudged"]["score"] > 0


def test_mipro_ends_when_the_reflection_model_is_down(outcome: dict[str, Any]) -> None:
    assert outcome["down"]["error"] == "ReflectionUnavailable"
