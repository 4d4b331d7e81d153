"""`ratchet up` and `ratchet down` with real processes; only vLLM is scripted (tests/harness/cli/scripted_vllm.py)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from ratchet.errors import CliError
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import pidfile, services
from ratchet.supervisor.pidfile import stop_leftover_processes
from tests.harness.cli.project import INTERRUPTED, Project, is_alive, wait_for


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a command; return its exit code and what it output."""
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


@pytest.mark.slow
def test_up_says_the_base_url_and_where_the_vllm_command_is_and_ctrl_c_stops_all_with_130(project: Project) -> None:
    up = project.up()
    pids = project.pids()
    url = f"http://127.0.0.1:{project.content['proxy']['port']}"
    with urllib.request.urlopen(f"{url}/health/ready", timeout=60) as answer:
        assert answer.status == 200
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code in INTERRUPTED
    log = project.state / "logs" / "vllm.log"
    assert f"its command is in {log}\n" in output
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in log.read_text().splitlines()[0]
    assert "--enable-lora" in log.read_text().splitlines()[0]
    assert max(map(len, output.splitlines())) < 400
    assert f"base_url: {url}/v1" in output
    assert f"console: {url}/ui/" in output
    assert "no judge is set" in output
    assert "Traceback" not in output
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_nothing_outlives_a_sigkill_of_up(project: Project) -> None:
    up = project.up(SCRIPTED_VLLM="ignores_sigterm")
    pids = project.pids()
    assert len(pids) == 5  # two services, two process guards, and what vLLM started in a session of its own
    assert all(is_alive(pid) for pid in pids)
    up.kill()
    up.communicate()
    wait_for("all have ended", lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.slow
def test_an_up_after_a_killed_one_ends_what_is_left_and_starts(project: Project) -> None:
    first = project.up()
    left = project.pids()
    process_guard = int((project.state / "run" / "vllm.process_guard.pid").read_text().split()[0])
    os.kill(process_guard, signal.SIGSTOP)  # a process_guard that cannot act
    first.kill()
    first.communicate()
    second = project.up()
    assert not [pid for pid in left[:-1] if is_alive(pid)]
    second.send_signal(signal.SIGTERM)
    code, output = finish(second)
    assert code == 143
    assert "left over from a run that was killed" in output


@pytest.mark.slow
def test_down_ends_all_and_is_idempotent(project: Project) -> None:
    detached = project.json("up", "--detach")
    pids = project.pids()
    assert detached["base_url"].endswith("/v1")
    status = json.loads(project.run("status", "--json").stdout)
    assert status["ready"]
    assert status["services"]["proxy"]["pid"] in pids
    assert status["store"]["live"] == {"model": "policy", "version": 0}
    began = time.monotonic()
    down = project.run("down")
    assert time.monotonic() - began < 20
    assert down.returncode == 0
    assert "vllm (pid" in down.stdout
    assert not [pid for pid in pids if is_alive(pid)]
    again = project.run("down")
    assert (again.returncode, again.stdout) == (0, "project default: nothing was running\n")


@pytest.mark.slow
def test_a_second_up_is_refused_and_names_the_first(project: Project) -> None:
    up = project.up()
    second = project.run("up")
    assert second.returncode == 1
    assert f"already up (pid {up.pid})" in second.stdout
    assert all(is_alive(pid) for pid in project.pids())
    up.send_signal(signal.SIGINT)
    finish(up)


@pytest.mark.slow
def test_a_service_that_dies_while_starting_is_named_with_the_end_of_its_log(project: Project) -> None:
    up = project.run("up", SCRIPTED_VLLM="dies_at_start")
    assert up.returncode == 1
    assert "vllm (pid" in up.stdout
    assert "exited with code 1" in up.stdout
    assert "RuntimeError: the scripted weights do not fit" in up.stdout
    assert str(project.state / "logs" / "vllm.log") in up.stdout
    assert "Traceback" not in up.stdout
    assert "nothing was running" in project.run("down").stdout


@pytest.mark.slow
def test_a_service_that_dies_is_started_again_and_ends_all_only_when_that_is_no_use(project: Project) -> None:
    project.write(max_restarts=1)
    up = project.up()
    before = project.running()["services"]
    os.kill(before["vllm"], signal.SIGKILL)
    wait_for("vLLM is back", lambda: project.running()["services"]["vllm"] != before["vllm"])
    after = project.running()
    assert after["services"]["proxy"] == before["proxy"]
    assert "was ended by SIGKILL" in after["exits"]["vllm"]["reason"]
    assert "exited: vllm (pid" in project.run("status").stdout
    pids = project.pids()
    os.kill(after["services"]["vllm"], signal.SIGSEGV)
    code, output = finish(up)
    assert code == 1
    assert "was ended by SIGKILL; it restarts in 1 s" in output
    assert (
        "was ended by SIGSEGV; it exited 2 times within 10 minutes (max_restarts); stopping the other services"
        in output
    )
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_a_detached_up_that_fails_says_why(project: Project) -> None:
    up = project.run("up", "--detach", SCRIPTED_VLLM="dies_at_start")
    assert up.returncode == 1
    assert "the scripted weights do not fit" in up.stdout


@pytest.mark.slow
def test_a_detached_up_is_not_taken_in_by_what_a_killed_one_left(project: Project) -> None:
    first = project.up()
    left = project.running() | {"base_url": "http://127.0.0.1:9/v1"}
    first.kill()
    first.communicate()
    (project.state / "run" / "running.json").write_text(json.dumps(left))
    assert not json.loads(project.run("status", "--json").stdout)["ready"]
    second = project.json("up", "--detach")
    assert second["pid"] not in (left["pid"], None)
    assert second["base_url"] != left["base_url"]
    assert project.run("down").returncode == 0


@pytest.mark.slow
def test_ctrl_c_while_waiting_for_a_detached_up_leaves_nothing(project: Project) -> None:
    up = project.start("up", "--detach")
    wait_for("vLLM is started", (project.state / "run" / "vllm.pid").exists)
    pids = [int(file.read_text().split()[0]) for file in (project.state / "run").glob("*.pid")]
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code in INTERRUPTED, output
    assert "Traceback" not in output
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_ctrl_c_while_stopping_does_not_break_the_stopping(project: Project) -> None:
    project.write(max_restarts=0)
    up = project.up(SCRIPTED_VLLM="ignores_sigterm")
    pids = project.pids()
    os.kill(project.running()["services"]["proxy"], signal.SIGKILL)
    assert up.stdout is not None
    lines = [up.stdout.readline()]
    while lines[-1] and "stopping ..." not in lines[-1]:  # before that, Ctrl-C ends it as at any other time
        lines.append(up.stdout.readline())
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 1
    assert "proxy (pid" in "".join(lines) + output
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_port_0_takes_any_free_port(project: Project) -> None:
    project.write(proxy={"port": 0}, vllm=project.content["vllm"] | {"port": 0})
    up = project.up()
    running = project.running()
    with urllib.request.urlopen(f"{running['proxy_url']}/health/ready", timeout=60) as answer:
        assert answer.status == 200
    assert not running["vllm_url"].endswith(":0")
    up.terminate()
    finish(up)


@pytest.mark.slow
def test_up_serves_with_several_workers_and_a_sigkill_of_it_leaves_none(project: Project) -> None:
    """As on a machine with many cores, where that is the default."""
    project.write(proxy={"port": 0, "workers": 2})
    up = project.up()
    proxy = psutil.Process(int((project.state / "run" / "proxy.pid").read_text().split()[0]))
    workers = [child for child in proxy.children(recursive=True) if is_alive(child.pid)]
    assert len(workers) >= 3  # and the coordinator
    assert json.loads(project.run("status", "--json").stdout)["ready"]
    with urllib.request.urlopen(f"{project.running()['proxy_url']}/health/ready", timeout=60) as answer:
        assert answer.status == 200
    up.kill()
    up.communicate()
    wait_for("all have ended", lambda: not any(is_alive(one.pid) for one in (proxy, *workers)))


@pytest.mark.slow
def test_later_commands_use_the_settings_of_the_last_up(project: Project) -> None:
    store = f"sqlite:///{project.folder / 'other.db'}"
    up = project.up("--model", "mail", "--store", store)
    pids = project.pids()
    live = {"model": "mail", "version": 0}
    assert json.loads(project.run("status", "--json").stdout)["store"]["live"] == live
    up.terminate()
    finish(up)
    assert not [pid for pid in pids if is_alive(pid)]
    assert json.loads(project.run("status", "--json").stdout)["store"]["live"] == live
    assert "mail@0" in project.run("policies", "list").stdout
    assert "there is no store" in project.run("policies", "list", "--store", str(project.folder / "new.db")).stdout


def test_a_store_password_is_not_saved_and_must_be_given_again(project: Project) -> None:
    run = project.state / "run"
    run.mkdir(parents=True)
    (run / "settings.json").write_text('{"store": "postgresql://u:***@db/prod", "model": "mail"}')
    status = project.run("status")
    assert status.returncode == 1
    assert "postgresql://u:***@db/prod, and its password is never saved" in status.stdout


@pytest.mark.slow
def test_a_learner_that_ends_by_itself_is_named_with_its_reason(project: Project) -> None:
    (project.folder / "mine.py").write_text("def judge(response):\n    return len(response)\n")
    project.write(trainer={"judge": "mine:judge"})  # and the model's folder holds no model
    up = project.run("up")
    assert up.returncode == 1
    assert "learner (pid" in up.stdout
    assert str(project.folder / "model") in up.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ("nomod:x", "No module named 'nomod'"),
        ("mine:other", "has no attribute 'other'"),
        ("mine:wants", "browser"),
    ],
)
def test_an_invalid_judge_is_reported_before_anything_starts(project: Project, judge: str, message: str) -> None:
    (project.folder / "mine.py").write_text("def wants(browser):\n    return 1.0\n")
    up = project.run("up", "--judge", judge)
    assert up.returncode == 1
    assert up.stdout.strip().startswith(f"ratchet: trainer.judge: judge {judge}")
    assert message in up.stdout
    assert not (project.state / "logs" / "vllm.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.5, 1.2])
def test_ctrl_c_while_starting_leaves_nothing(project: Project, moment: float) -> None:
    up = project.start("up")
    wait_for("up has begun", (project.state / "run" / "up.pid").exists)
    time.sleep(moment)
    children = [int(f.read_text().split()[0]) for f in (project.state / "run").glob("*.pid") if f.name != "up.pid"]
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code in INTERRUPTED, output
    assert "Traceback" not in output
    assert not [pid for pid in children if is_alive(pid)]
    assert not project.helper.exists() or not is_alive(int(project.helper.read_text()))


@pytest.mark.slow
def test_a_busy_port_that_was_chosen_names_who_holds_it(project: Project) -> None:
    with socket.create_server(("127.0.0.1", project.content["proxy"]["port"])):
        up = project.run("up")
    assert up.returncode == 1
    assert f"is used by pid {os.getpid()}" in up.stdout
    assert "set proxy.port to a free port" in up.stdout


@pytest.mark.slow
def test_a_full_disk_is_reported_before_anything_starts(project: Project) -> None:
    project.write(min_free_disk_mb=10**9)
    up = project.run("up")
    assert up.returncode == 1
    assert "min_free_disk_mb" in up.stdout
    assert not (project.state / "run" / "vllm.pid").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vllm": {"command": ["no-such-vllm"]}}, "no-such-vllm was not found"),
        ({"base_model": "./nowhere"}, "no such folder"),
        ({"base_model": "."}, "it has no config.json"),
        ({"base_model": None}, "give --base-model"),
        ({"learner": {"lor_r": 4}}, "the nearest known key is learner.lora_r"),
    ],
)
def test_bad_input_is_one_line_that_names_the_remedy(project: Project, change: dict[str, object], message: str) -> None:
    project.write(**change)
    up = project.run("up")
    assert up.returncode == 1
    assert message in up.stdout
    assert up.stdout.count("\n") == 1


@pytest.mark.slow
def test_no_secret_reaches_a_file(project: Project) -> None:
    up = project.up(RATCHET_API_KEYS="sk-very-secret", RATCHET_UPSTREAM_API_KEY="sk-also-secret")
    files = [file for file in Path(project.state).rglob("*") if file.is_file()]
    assert not [file for file in files if b"-secret" in file.read_bytes()]
    up.send_signal(signal.SIGINT)
    finish(up)


@pytest.mark.slow
def test_an_adapter_store_that_cannot_be_written_is_refused_before_anything_starts(project: Project) -> None:
    (project.folder / "mine.py").write_text("def judge(response):\n    return len(response)\n")
    project.write(trainer={"judge": "mine:judge"}, adapters={"store": "/dev/null/adapters"})
    up = project.run("up")
    assert up.returncode == 1
    assert "no version can be written to /dev/null/adapters" in up.stdout
    assert "set adapters.store to another folder" in up.stdout
    assert not project.running()


@pytest.mark.slow
def test_a_project_whose_folder_was_deleted_is_named_refused_and_ended(project: Project) -> None:
    up = project.up()
    pids = project.pids()
    shutil.rmtree(project.folder / ".ratchet")
    status = project.run("status").stdout
    assert f"project default: up (pid {up.pid}), but its state folder was deleted while it ran" in status
    assert json.loads(project.run("status", "--json").stdout)["orphaned_pid"] == up.pid
    second = project.run("up")
    assert second.returncode == 1
    assert f"already up (pid {up.pid}, whose state folder was deleted while it ran)" in second.stdout
    assert "`ratchet down --project default`" in second.stdout
    down = project.run("down")
    assert down.returncode == 0
    assert f"up (pid {up.pid}) with its services" in down.stdout
    up.communicate(timeout=120)
    assert not [pid for pid in pids if is_alive(pid)]
    assert project.run("down").stdout == "project default: nothing was running\n"
    assert not json.loads(project.run("status", "--json").stdout)["orphaned_pid"]


def test_a_folder_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = StateFolder(tmp_path / "state")
    pidfile.write_user_pidfile(state)
    (folder,) = tmp_path.glob("ratchet-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert pidfile.orphaned_pid(state) is not None
    folder.chmod(0o777)  # anybody could have written it
    assert pidfile.running_supervisor(state) is None
    pidfile.write_user_pidfile(state)
    pidfile.remove_user_pidfile(state)
    folder.chmod(0o700)
    pidfile.remove_user_pidfile(state)
    assert pidfile.running_supervisor(state) is None


def test_a_default_port_that_is_busy_moves_to_the_next_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()[1]
        assert services.choose_port("vllm", "vllm.port", "127.0.0.1", busy, fixed=False, taken=set()) > busy


def test_a_chosen_port_that_is_busy_names_pid_and_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()[1]
        with pytest.raises(CliError, match=rf"vllm: port {busy} is used by pid {os.getpid()} .* set vllm.port"):
            services.choose_port("vllm", "vllm.port", "127.0.0.1", busy, fixed=True, taken=set())


def test_two_services_never_get_the_same_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1] + 1
    assert services.choose_port("vllm", "vllm.port", "127.0.0.1", free, fixed=False, taken={free}) != free
    with pytest.raises(CliError, match="another service"):
        services.choose_port("vllm", "vllm.port", "127.0.0.1", free, fixed=True, taken={free})


def test_a_port_on_which_a_vllm_that_starts_will_listen_is_not_free_and_one_in_time_wait_is() -> None:
    with socket.socket() as starting:
        starting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        starting.bind(("127.0.0.1", 0))
        port = starting.getsockname()[1]
        assert not services.is_free("127.0.0.1", port)
    assert services.is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = server.accept()
        served.close()  # the side that closes first keeps TIME_WAIT
        client.close()
    assert services._has_connections(port)
    assert services.is_free("127.0.0.1", port)


def test_port_0_takes_a_free_one() -> None:
    port = services.choose_port("vllm", "vllm.port", "127.0.0.1", 0, fixed=True, taken=set())
    assert port > 0
    assert services.is_free("127.0.0.1", port)


def test_a_running_process_is_found(tmp_path: Path) -> None:
    pidfile.write(tmp_path / "a.pid", os.getpid())
    process = pidfile.running(tmp_path / "a.pid")
    assert process is not None
    assert process.pid == os.getpid()


def test_a_recycled_pid_is_not_the_process_that_was_recorded(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    state.make(min_free_disk_mb=0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        recorded = pidfile.write(state.pid("vllm"), other.pid)
        assert recorded is not None
        state.pid("vllm").write_text(f"{other.pid} {recorded.create_time() - 60}\n")
        assert stop_leftover_processes(state) == []
        assert other.poll() is None
        other.kill()
    assert not state.pid("vllm").exists()


def test_a_damaged_pid_file_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "a.pid").write_text("not a pid")
    assert pidfile.running(tmp_path / "a.pid") is None
    assert pidfile.running(tmp_path / "none.pid") is None
