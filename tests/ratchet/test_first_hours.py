"""Mistakes of new users: reported once, before anything starts, with the remedy."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ratchet import status
from ratchet.settings.load_settings import load
from ratchet.store.operation_records import ProxyInstance
from ratchet.store.store import open_store
from ratchet.supervisor import pidfile
from tests.harness.cli.project import Project
from tests.harness.records import judged_group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--store", "mysql://u:secret@db/x"), "--store: mysql is not supported; use sqlite:///PATH or postgresql://"),
        (("--store", "/proc/x.db"), "/proc/x.db; name a --store in a folder that this user may write"),
        (("--store", "/nosuch/dir/x.db"), "there is no folder /nosuch/dir; make it"),
        (("--store", "postgresql://u:secret@127.0.0.1:1/x"), "is PostgreSQL running there, and are host, port, user"),
    ],
)
def test_an_unusable_store_is_the_only_message(project: Project, arguments: tuple[str, ...], message: str) -> None:
    up = project.run("up", *arguments)
    assert up.returncode == 1
    assert message in up.stdout
    assert up.stdout.count("\n") == 1, up.stdout
    assert "secret" not in up.stdout
    assert not Path("/nosuch").exists()
    assert not (project.state / "logs" / "vllm.log").exists()


@pytest.mark.slow
def test_an_open_host_without_a_key_is_refused_once_before_anything_starts(project: Project) -> None:
    project.write(proxy=project.content["proxy"] | {"host": "0.0.0.0"})
    up = project.run("up")
    assert up.returncode == 1
    assert up.stdout.count("`ratchet keys create --name NAME`") == 1
    assert up.stdout.count("\n") == 1, up.stdout
    assert not (project.state / "logs" / "vllm.log").exists()


@pytest.mark.slow
def test_a_tool_call_parser_that_vllm_does_not_know_is_named_with_those_that_it_knows(project: Project) -> None:
    project.write(vllm={"port": project.content["vllm"]["port"], "tool_call_parser": "herms"})
    up = project.run("up")
    assert up.returncode == 1
    assert "vllm.tool_call_parser: 'herms' is not a parser of vLLM; the nearest is hermes. vLLM has " in up.stdout
    assert "qwen3_coder" in up.stdout
    assert "Traceback" not in up.stdout


@pytest.mark.slow
def test_a_state_folder_that_cannot_be_made_is_not_blamed_on_a_full_disk(project: Project) -> None:
    project.write(state_dir="/proc/nowhere")
    up = project.run("up")
    assert up.returncode == 1
    assert "cannot be created" in up.stdout
    assert "set `state_dir` (RATCHET_STATE_DIR) " in up.stdout
    assert "free the disk" not in up.stdout


@pytest.mark.slow
def test_a_detached_up_says_what_it_does_and_where_the_console_is_and_no_long_command(project: Project) -> None:
    up = project.run("up", "--detach")
    assert up.returncode == 0
    assert "no judge is set" in up.stdout  # a note
    for line in ("vllm: starting", "proxy: starting", "vllm: ready after", "proxy: ready after"):
        assert up.stdout.count(line) == 1
    assert up.stdout.count("base_url: ") == 1
    assert f"console: http://127.0.0.1:{project.content['proxy']['port']}/ui/" in up.stdout
    assert "--enable-lora" not in up.stdout
    assert project.run("down").returncode == 0


@pytest.mark.slow
def test_a_dead_proxy_of_the_project_itself_was_not_started_elsewhere(project: Project) -> None:
    (project.state / "run").mkdir(parents=True)
    store = open_store(f"sqlite:///{project.state / 'store.db'}")
    for name, url in (("proxy_1", "http://127.0.0.1:8000"), ("proxy_2", "http://far:8000")):
        store.proxy_instances.heartbeat(ProxyInstance(name, url, {"policy": 0}, {}, time.time(), time.time()))
    store.close()
    left = {"pid": 1, "proxy_url": "http://127.0.0.1:8000"}
    (project.state / "run" / "running.json").write_text(json.dumps(left))  # as kill -9 leaves it
    status = project.run("status").stdout
    assert "of this store, started elsewhere: http://far:8000\n" in status


def test_the_status_shows_that_an_exited_process_restarts(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    run = project.state / "run"
    run.mkdir(parents=True)
    pidfile.write(run / "up.pid", os.getpid())
    services = {"vllm": 1, "proxy": 1}
    record = {"pid": os.getpid(), "ready": True, "services": services, "exits": {}}
    (run / "running.json").write_text(json.dumps(record))
    found = status.collect_status(load(project.folder / "ratchet.yaml", environ={}))
    assert found["services"]["vllm"]["state"] == "restarting"
    assert found["services"]["trainer"]["state"] == "stopped"  # it was never started
    assert any("exited; `ratchet up` restarts it" in line for line in status.status_lines(found))
    given_up = {"vllm": {"count": 6, "reason": "no memory", "given_up": True}}
    (run / "running.json").write_text(json.dumps(record | {"exits": given_up}))
    found = status.collect_status(load(project.folder / "ratchet.yaml", environ={}))
    assert found["services"]["vllm"]["state"] == "stopped"
    (run / "up.pid").unlink()


@pytest.mark.slow
def test_groups_are_listed_by_state_and_shown_with_what_each_member_scored(project: Project) -> None:
    file = str(project.folder / "filled.db")
    store = open_store(file)
    judged_group(store, ["a", "b"], [0.0, 1.0])
    dropped = judged_group(store, ["c", "d"], [1.0, 1.0])
    store.groups.drop(dropped.id, "no_variance")
    store.close()
    listed = project.json("groups", "list", "--store", file)
    assert [(one["state"], one.get("drop_reason"), one["members"]) for one in listed] == [
        ("dropped", "no_variance", ["c", "d"]), ("judged", None, ["a", "b"]),
    ]  # fmt: skip
    assert listed[1]["verdicts"]["b"]["score"] == 1.0
    (only,) = project.json("groups", "list", "--state", "dropped", "--reason", "no_variance", "--store", file)
    assert only["id"] == dropped.id
    (older,) = project.json("groups", "list", "--before", dropped.id, "--limit", "1", "--store", file)
    shown = project.run("groups", "show", older["id"], "--store", file).stdout
    assert "  a  0  " in shown
    assert "  b  1  " in shown
    assert project.json("groups", "show", older["id"], "--store", file) == older
    table = project.run("groups", "list", "--store", file).stdout
    assert dropped.id in table
    assert "0, 1" in table
    assert "no group matches" in project.run("groups", "list", "--state", "ready", "--store", file).stdout
