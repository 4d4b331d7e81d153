"""Agents join and leave while services run: the watch of the settings file, and `ratchet reload`."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from ratchet.settings.agents_watch import AgentsWatch
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings
from ratchet.store.store import open_store
from ratchet.supervisor.services import write_resolved_settings
from tests.harness.cli.project import Project, wait_for
from tests.harness.trainer.tiny import build_tiny_model

JUDGE = "tests.harness.tuner.judges:exact"
ONE = "trainer: {judge: a:b}\nagents: {mail: {}}"
TWO = "trainer: {judge: a:b}\nagents: {mail: {}, support: {judge: c:d}}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file with one agent."""
    path = tmp_path / "ratchet.yaml"
    path.write_text(ONE)
    return path


def watch(file: Path, apply: Callable[[Settings], None], seconds: float = 2.0) -> AgentsWatch:
    """A watch of the file that nothing starts yet."""

    def read() -> Settings:
        return load(file, environ={})

    return AgentsWatch(file, read(), read, apply, seconds)


def replace(file: Path, text: str) -> None:
    """Replace a file as a whole, as Kubernetes does with a mounted ConfigMap."""
    other = file.with_suffix(".new")
    other.write_text(text)
    other.replace(file)


def test_agents_that_join_change_and_leave_are_applied(file: Path) -> None:
    seen: list[Settings] = []
    watched = watch(file, seen.append)
    watched.look()
    assert not seen
    for text in (TWO, TWO.replace("c:d", "e:f"), ONE):
        replace(file, text)
        watched.look()
        watched.look()
    assert [list(settings.agents) for settings in seen] == [["mail", "support"], ["mail", "support"], ["mail"]]
    assert seen[1].given["agents"]["support"]["judge"] == "e:f"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("agents: [", "is not YAML"),
        (TWO.replace("support", "Mail"), "differ by case only"),
        (TWO.replace("support: {", "support: {jugde: x, "), "unknown key agents.support.jugde"),
        (TWO.replace("support: {", "support: {num_generations: 1, "), "agents.support.num_generations"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_and_changes_nothing(
    file: Path, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Settings] = []
    watched = watch(file, seen.append)
    replace(file, text)
    watched.look()
    assert not seen
    assert "event=settings_refused" in caplog.text
    assert reason in caplog.text
    replace(file, TWO)
    watched.look()
    assert len(seen) == 1
    file.unlink()
    watched.look()
    assert len(seen) == 1


def test_keys_that_need_a_restart_are_named_and_not_applied(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    seen: list[Settings] = []
    watched = watch(file, seen.append)
    replace(file, TWO.replace("judge: a:b", "judge: a:b, groups_per_round: 3") + "\nvllm: {max_loras: 9}")
    watched.look()
    assert "keys=trainer.groups_per_round,vllm.max_loras" in caplog.text
    (applied,) = seen
    assert list(applied.agents) == ["mail", "support"]
    assert (applied.vllm.max_loras, applied.given["agents"]["support"]) == (None, {"judge": "c:d"})


def test_the_thread_follows_the_file(file: Path) -> None:
    applied = threading.Event()
    watched = watch(file, lambda _: applied.set(), 0.01)
    watched.start()
    replace(file, TWO)
    assert applied.wait(60)
    watched.stop()


def test_a_project_of_one_agent_gets_a_second_one(file: Path) -> None:
    file.write_text("model: mail\ntrainer: {judge: a:b}")
    seen: list[Settings] = []
    watched = watch(file, seen.append)
    replace(file, TWO)
    watched.look()
    assert list(seen[0].agents_by_name) == ["mail", "support"]
    resolved = file.with_name("settings.json")
    write_resolved_settings(seen[0], resolved)
    assert load(resolved, environ={}).agents == seen[0].agents, "the services read what a reload writes"


@pytest.mark.slow
def test_reload_lets_an_agent_join_and_leave_a_project_that_is_up(project: Project) -> None:
    refused = project.call("reload")
    assert refused.returncode == 1
    assert "is not up: `ratchet up` starts it" in refused.stdout
    project.write(
        agents={"mail": {}}, proxy=project.content["proxy"] | {"agent_limits": {"mail": {"requests_per_minute": 9}}}
    )
    up = project.up()
    project.write(agents={"mail": {}, "support": {"roles": ["writer"]}}, max_restarts=3, min_free_disk_mb=500)
    reloaded = project.call("reload")
    assert reloaded.returncode == 0, reloaded.stdout
    assert "agents: joined support" in reloaded.stdout
    assert "(`ratchet down`, `ratchet up`): max_restarts" in reloaded.stdout
    assert list(load(project.state / "run" / "settings.json", environ={}).agents) == ["mail", "support"]
    store = open_store(f"sqlite:///{project.state / 'store.db'}", create=False)
    assert store.base_models.base_model_of("support") is not None
    store.close()
    assert project.json("reload")["joined"] == []
    project.write(agents={"mail": {}, "bad": {"judge": "nowhere:judge"}})
    broken = project.call("reload")
    assert "agents.bad.judge" in broken.stdout
    assert list(load(project.state / "run" / "settings.json", environ={}).agents) == ["mail", "support"]
    project.write(agents={"mail": {}, "graded": {"judge": JUDGE}})
    late = project.call("reload").stdout
    assert "joined graded; left support" in late
    assert "the trainer's process, which no agent needed" in late
    up.terminate()
    up.communicate()


@pytest.mark.slow
def test_the_proxy_serves_an_agent_that_joined_and_refuses_one_that_left(project: Project) -> None:
    project.write(agents={"mail": {}})
    up = project.up()
    url = project.running()["base_url"]

    def listed() -> set[str]:
        return {card["id"] for card in httpx.get(f"{url}/models", trust_env=False).json()["data"]}

    assert "mail" in listed()
    project.write(agents={"support": {}})
    assert "joined support; left mail" in project.call("reload").stdout
    wait_for("the proxy serves support, and mail no more", lambda: "support" in listed() and "mail" not in listed(), 60)
    up.terminate()
    up.communicate()


@pytest.mark.slow
def test_the_trainer_starts_every_agent_and_one_that_joins(project: Project) -> None:
    model = build_tiny_model(project.folder / "tiny", hidden=32, layers=1)
    engine = {"command": [sys.executable, "-m", "tests.harness.proxy.scripted_vllm"]}
    agents: dict[str, dict[str, str]] = {"mail": {}, "support": {"advantage_estimator": "rloo"}}
    project.write(
        base_model=str(model), vllm=project.content["vllm"] | engine, trainer={"judge": JUDGE}, learner={"threads": 1},
        agents=agents,
    )  # fmt: skip
    assert project.run("up", "--detach", seconds=240).returncode == 0
    log = project.state / "logs" / "trainer.log"

    def is_trained(name: str) -> bool:
        return f"event=trainer_ready alias={name} " in log.read_text()

    for name in agents:
        wait_for(f"{name} is trained", partial(is_trained, name), 240)
    project.write(agents=agents | {"later": {}})
    assert "joined later" in project.call("reload").stdout
    wait_for("later is trained", partial(is_trained, "later"), 240)
    assert project.run("down").returncode == 0
