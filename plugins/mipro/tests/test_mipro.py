"""MIPRO, in an environment of its own: DSPy needs another major version of OpenAI's SDK than the other tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.cli.project import ROOT, Project
from tests.harness.clients.program import client_python
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompt_project import PromptProject, prompt_project

pytestmark = pytest.mark.clients

_ROW = re.compile(r'\{"question".*?\}')


class ScriptedDspyModel(ScriptedReflectionModel):
    """Answers the requests of DSPy's MIPRO in their own form."""

    proposals = 0

    def answer(self, body: Mapping[str, Any]) -> str:
        """Return the answer to a request."""
        words = "\n".join(str(message["content"]) for message in body["messages"])
        field = words.rpartition("starting with the field `[[ ## ")[2].partition(" ## ]]")[0]
        text = "They ask for words."
        if field == "observations":
            rows = [json.loads(found) for found in _ROW.findall(words)]
            text = "Each asks for the word of a thing: " + "; ".join(sorted({json.dumps(row) for row in rows}))
        elif field == "summary":
            text = words.rpartition("[[ ## observations ## ]]")[2].partition("Respond with")[0].strip()
        elif field == "proposed_instruction":
            text = self._proposed(words)
        return f"[[ ## {field} ## ]]\n{text}\n\n[[ ## completed ## ]]"

    def _proposed(self, words: str) -> str:
        """Return the n-th proposal, which contains n more rules; after the last it starts over."""
        rows = [json.loads(found) for found in _ROW.findall(words)]
        prompt = words.rpartition("[[ ## basic_instruction ## ]]")[2].partition("[[ ##")[0].strip()
        for _ in range(self.proposals % 4):
            prompt = self.propose(prompt, rows)
        self.proposals += 1
        return prompt


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of MIPRO's searches in the small world."""
    program = [str(client_python("mipro")), str(Path(__file__).with_name("mipro_in_the_small_world.py"))]
    home = tmp_path_factory.mktemp("home")
    with ScriptedDspyModel() as server:
        done = subprocess.run(
            [*program, server.base_url], capture_output=True, text=True, env=environment(HOME=str(home)), timeout=240,
            check=False,
        )  # fmt: skip
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
    assert outcome["down"]["error"] == "TuningError"


@pytest.fixture
def prompts(project: Project) -> Iterator[PromptProject]:
    with prompt_project(project, ScriptedDspyModel()) as made:
        yield made


def test_mipro_finds_it_too_through_the_command(prompts: PromptProject) -> None:
    words = ["-m", "ratchet", "tune", "prompt", *prompts.arguments(method="mipro"), "--json"]
    done = subprocess.run(
        [str(client_python("mipro")), *words], capture_output=True, text=True, timeout=240, check=False,
        cwd=prompts.project.folder,
        env=environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(prompts.project.folder)])),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["details"]["verdict"] == "better"
    assert result["technique"].startswith("MIPRO")
    assert result["details"]["budget"]["rollouts_begun"] == len(prompts.vllm.prompts)
