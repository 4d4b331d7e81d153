"""Claims about the doctor's checks with a learner that runs already: a scripted one, over HTTP."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.checks.check_result import CheckResult
from ratchet.checks.learner_check import _train, check_learner, check_swap, running_learner
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings
from ratchet.supervisor import services
from ratchet.supervisor.supervisor import Supervisor
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.learner_client import LearnerConnection
from tests.harness.cli.project import Project
from tests.harness.ports import free_port
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.scripted_learner import TOKEN, ScriptedHost, ScriptedLearner, scripted_service

JUDGE = "tests.harness.tuner.judges:exact"
PROBES = [tuple(range(1, end)) for end in range(3, 12)]


@pytest.fixture
def host() -> ScriptedHost:
    return ScriptedHost()


@pytest.fixture
def settings(project: Project) -> Settings:
    project.write(trainer={"judge": JUDGE}, state_dir=str(project.folder / "state"))
    return load(project.folder / "ratchet.yaml", environ={})


@pytest.fixture
def learner(host: ScriptedHost, settings: Settings) -> Iterator[LearnerConnection]:
    with scripted_service(host, settings.state.models) as connection:
        yield connection


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with contextlib.closing(ScriptedEngine(lambda *_: 0.0)) as engine:
        engine.scorer = Faithful(engine, ScriptedLearner)
        yield engine


def findings(settings: Settings, url: str) -> dict[str, CheckResult]:
    elsewhere = settings.changed(learner={"url": url})
    return {found.name: found for found in check_learner(elsewhere, {}, ())}


def test_the_doctor_trains_in_the_running_learner_and_leaves_nothing(
    host: ScriptedHost, learner: LearnerConnection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    found = findings(settings, learner.url)
    assert found["gradient"].passed, found
    assert "by 1.0000 (norm), in the project's learner" in found["gradient"].seen
    assert [verb for _, verb in host.ran] == ["open", "score", "train", "close"]
    assert host.weights == {}
    assert not list(settings.state.models.glob("*"))


def test_the_doctor_uses_the_token_that_up_has_made(
    learner: LearnerConnection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    refused = findings(settings, learner.url)["gradient"]
    assert not refused.passed
    assert "set RATCHET_LEARNER_TOKEN to the learner's" in refused.seen
    settings.state.make(min_free_disk_mb=0)
    settings.state.learner_token.write_text(TOKEN)
    assert findings(settings, learner.url)["gradient"].passed


def test_a_learner_that_does_not_answer_fails_the_check_with_its_log(settings: Settings) -> None:
    found = findings(settings, f"http://127.0.0.1:{free_port()}")["gradient"]
    assert not found.passed
    assert "does not answer" in found.seen
    assert found.remedy.endswith("learner.log")


def test_the_adapter_of_the_running_learner_is_served_compared_and_removed(
    learner: LearnerConnection, settings: Settings, engine: ScriptedEngine
) -> None:
    own = settings.trainer
    with running_learner(learner.url, TOKEN, own) as checked:
        _train(checked.learner, (1, 2, 3))
        found = check_swap(engine.url, "base", checked, PROBES, 0.1)
        assert Path(checked.reference).is_dir()
    assert found.passed, found
    assert engine.log == [f"load {checked.served_name}", f"unload {checked.served_name}"]
    assert not list(settings.state.models.glob("*"))
    engine.scorer = lambda name, ids: -0.1 * ids[-1]  # vLLM ignores the adapter
    with running_learner(learner.url, TOKEN, own) as checked:
        _train(checked.learner, (1, 2, 3))
        assert not check_swap(engine.url, "base", checked, PROBES, 0.1).passed


def test_up_keeps_the_token_of_its_learner_for_the_owner_only_and_not_the_users(
    settings: Settings, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.supervisor.preflight_checks.check_judges", lambda *_: None)

    def started(**environment: str) -> tuple[services.LaunchPlan, Path]:
        supervisor = Supervisor(settings)
        try:
            plan = supervisor.prepare()
            supervisor._write_learner_token()
            return plan, settings.state.learner_token
        finally:
            supervisor.stop()

    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    plan, file = started()
    environments: list[Any] = [one.environment for one in plan.services if one.name in ("learner", "trainer")]
    assert {environment[TOKEN_VARIABLE] for environment in environments} == {plan.learner_token, file.read_text()}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert plan.learner_url is not None
    assert plan.learner_token is not None
    assert plan.learner_token not in json.dumps(plan.settings.model_dump(mode="json"))
    monkeypatch.setenv(TOKEN_VARIABLE, "the user's")
    plan, file = started()
    assert plan.learner_token is None
    assert not file.exists()
