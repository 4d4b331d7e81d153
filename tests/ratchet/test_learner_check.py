"""The doctor and what runs: gradients, adapters, mixed batches, resampling, and services without a project."""

from __future__ import annotations

import contextlib
import json
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.checks.check_result import CheckResult
from ratchet.checks.doctor import check_resampling, describe_problem, is_resampling_enabled
from ratchet.checks.learner_check import _train, check_batches, check_learner, check_swap, running_learner
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings
from ratchet.store.reasons import DropReason
from ratchet.store.store import open_store
from ratchet.supervisor import services
from ratchet.supervisor.supervisor import Supervisor
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.collect.resampler import KEY_VARIABLE
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.learner_client import LearnerConnection
from tests.harness.cli.project import Project
from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.ports import free_port
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.scripted_learner import TOKEN, ScriptedHost, ScriptedLearner, scripted_service
from tests.proxy.test_keys import made

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


BATCH_PROBES = [(1, 2, 3), (4, 5)]


class MixingEngine(ScriptedEngine):
    """An adapter's logprobs are half a nat lower. If it `mixes`, an adapter answers for the base beside other calls."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__(self._logprob)
        self.reply = self._busily
        self._mixes = mixes
        self._busy = 0

    def _logprob(self, name: str, ids: Sequence[int]) -> float:
        return -float(ids[-1]) - 0.5 * (name in self.loaded or (self._mixes and self._busy > 0))

    def _busily(self, name: str, messages: Sequence[Any]) -> str:
        self._busy += 1
        time.sleep(0.3)
        self._busy -= 1
        return "noted"


def prove(engine: MixingEngine) -> tuple[bool, str]:
    with contextlib.closing(engine), contextlib.closing(VllmServer(engine.url)) as replica:
        found = check_batches(replica, "policy@0", Path("/adapter"), 2, BATCH_PROBES)
    assert engine.loaded == {}
    assert {body["max_tokens"] for body in engine.requests} == {8}, (
        "a CPU takes minutes for more with several adapters of a real model"
    )
    return found.passed, found.seen + found.remedy


def test_an_engine_that_keeps_base_and_adapters_apart_passes() -> None:
    passed, text = prove(MixingEngine(mixes=False))
    assert passed, text


def test_an_engine_that_answers_the_base_model_by_an_adapter_fails_with_the_remedy() -> None:
    passed, text = prove(MixingEngine(mixes=True))
    assert not passed
    assert "an adapter answers requests for the base model" in text
    assert "without Ratchet's plug-in" in text


SETTINGS = Settings.of({"trainer": {"resample": {"samples": 2}}})


@pytest.mark.slow
def test_each_obstacle_to_resampling_is_reported_with_its_remedy(
    tmp_path: Path, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_resampling_enabled(SETTINGS)
    assert not is_resampling_enabled(Settings.of({}))
    assert "ratchet up" in check_resampling(SETTINGS, {}).remedy
    store, engine = open_store(str(store_file)), ScriptedEngine(lambda name, ids: 0.0)
    with served(ScriptedVllm()) as url, running(url, store, tmp_path) as proxy:
        project = {"vllm_url": engine.url, "base_url": f"{proxy.url}/v1"}
        engine.load = None
        assert "--disable-log-stats" in check_resampling(SETTINGS, project).remedy
        engine.load = (3, 1)
        assert check_resampling(SETTINGS, project).passed
        key, _ = made(store)
        eventually(lambda: proxy.http.get("/v1/models").status_code == 401)
        refused = check_resampling(SETTINGS, project)
        assert (refused.passed, KEY_VARIABLE in refused.remedy) == (False, True)
        monkeypatch.setenv(KEY_VARIABLE, key)
        assert check_resampling(SETTINGS, project).passed
    engine.close()
    store.close()


def problem(version: str | None, engines: Sequence[str] = ("0",)) -> str:
    """What is found at a scripted server."""
    gauges = [f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} 0.0' for engine in engines]

    def respond(request: IncomingRequest) -> tuple[int, Any]:
        if request.path == "/metrics":
            return 200, "\n".join(["# TYPE vllm:num_requests_running gauge", *gauges]) + "\n"
        return (200, {"version": version}) if version else (404, {"detail": "Not Found"})

    with contextlib.closing(JsonServer(respond)) as server, contextlib.closing(VllmServer(server.url)) as replica:
        return " ".join(describe_problem(replica) or ())


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.1.dev5+gabc", "1.0.0", None])
def test_a_release_with_the_mended_eviction_passes(version: str | None) -> None:
    assert problem(version) == ""


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "0.22.0+cpu"])
def test_an_older_release_is_refused_with_the_first_that_is_safe(version: str) -> None:
    found = problem(version)
    assert f"runs vLLM {version}" in found
    assert "install vLLM 0.26.0 or later" in found


def test_data_parallelism_is_refused_with_the_remedy() -> None:
    found = problem("0.32.0", ("0", "1"))
    assert "has 2 engines" in found
    assert "name each as a replica" in found
    assert problem("0.32.0", ()) == ""  # metrics are off


DOCTOR_JUDGE = {"kind": "workflow"}  # of rollouts, without which there is nothing to check


def _doctor(project: Project, *words: str, **environ: str) -> tuple[int, dict[str, Any]]:
    done = project.call("doctor", *words, "--json", **environ)
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)}


@pytest.mark.slow
def test_services_without_a_project_are_checked_and_what_needs_one_is_skipped(
    project: Project, store_file: Path, tmp_path: Path
) -> None:
    project.write(model="agent", trainer={"judge": DOCTOR_JUDGE, "resample": {"samples": 2}})
    store = open_store(str(store_file))
    with (
        served(ScriptedVllm()) as vllm_url,
        running(vllm_url, store, tmp_path) as proxy,
        scripted_service(ScriptedHost(), project.state / "models") as learner,
    ):
        project.write(learner={"url": learner.url})
        words = ("--proxy", f"{proxy.url}/v1", "--store", str(store_file))
        code, found = _doctor(project, *words, **{TOKEN_VARIABLE: TOKEN})
        assert code == 0, found
        assert [name for name, one in found.items() if one["passed"]] == ["capture", "gradient", "judge"]
        skipped = [name for name, one in found.items() if one["skipped"]]
        assert skipped == ["vllm", "swap", "resampling"]
        assert all("needs a project started by `ratchet up`" in found[name]["seen"] for name in skipped)
        (dropped,) = store.trajectories.page()
        assert dropped.drop_reason == DropReason.DOCTOR
        shown = project.call("doctor", *words, **{TOKEN_VARIABLE: TOKEN})
        assert "skip  swap" in shown.stdout
        assert shown.stdout.index("...   gradient") < shown.stdout.index("pass  gradient")
        assert "FAIL" not in shown.stdout

        code, found = _doctor(project, *words[:2], "--store", "typo.db", **{TOKEN_VARIABLE: TOKEN})
        assert (code, "there is no store at" in found["capture"]["seen"]) == (1, True)
        assert not (project.folder / "typo.db").exists()

        key, _ = made(store)
        eventually(lambda: proxy.http.get("/v1/models").status_code == 401)
        code, found = _doctor(project, *words, **{TOKEN_VARIABLE: TOKEN})
        assert (code, "RATCHET_API_KEYS is not set" in found["capture"]["seen"]) == (1, True)
        code, _ = _doctor(project, *words, **{TOKEN_VARIABLE: TOKEN, "RATCHET_API_KEYS": key})
        assert code == 0
    store.close()
