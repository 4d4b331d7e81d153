"""The base model: a hub name is looked up before anything starts; another one under an existing project is refused."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ratchet.errors import CliError
from ratchet.settings.load_settings import load_agent
from ratchet.store.store import open_store
from ratchet.supervisor import up
from tests.harness.cli.project import Project
from tests.harness.ports import free_port
from tests.harness.records import call_start, commit_round, ended
from tests.ratchet.test_up import finish


def record_something(project: Project) -> None:
    """As a project that has served: a trajectory, and a version that was trained."""
    store = open_store(f"sqlite:///{project.state / 'store.db'}")
    store.calls.ship([ended(call_start("call_1", "t1", alias="policy"), {"role": "assistant", "content": "hello"})])
    commit_round(store, "policy", 1, checkpoint=str(project.folder / "1"))
    store.close()


def perturbed(project: Project) -> Path:
    """A copy of the model of the same shape, with other weights."""
    other = shutil.copytree(project.folder / "model", project.folder / "perturbed")
    (other / "model.safetensors").write_bytes(b"noise")
    return other


def end(up: subprocess.Popen[str]) -> str:
    up.terminate()
    return finish(up)[1]


@pytest.mark.slow
def test_a_perturbed_copy_of_the_base_is_refused_before_anything_starts(project: Project) -> None:
    end(project.up())
    record_something(project)
    logs = {log: log.stat().st_mtime_ns for log in (project.state / "logs").iterdir()}
    other = perturbed(project)
    refused = project.run("up", "--base-model", str(other))
    assert refused.returncode == 1
    assert f"belong to {project.folder / 'model'}, and {other} is another model (weights " in refused.stdout
    assert "policy@0 to policy@1" in refused.stdout
    assert "--project NAME" in refused.stdout
    assert f"move {project.state} away" in refused.stdout
    assert "vLLM" not in refused.stdout
    assert {log: log.stat().st_mtime_ns for log in (project.state / "logs").iterdir()} == logs
    moved = shutil.copytree(project.folder / "model", project.folder / "moved")  # the same model elsewhere is the same
    end(project.up("--base-model", str(moved)))


@pytest.mark.slow
def test_a_project_with_a_store_of_its_own_choice_is_given_a_remedy_that_helps_there(project: Project) -> None:
    project.write(store=str(project.folder / "shared.db"))
    end(project.up())
    store = open_store(str(project.folder / "shared.db"))
    store.calls.ship([ended(call_start("call_1", "t1", alias="policy"), {"role": "assistant", "content": "hello"})])
    store.close()
    refused = project.run("up", "--base-model", str(perturbed(project)))
    assert refused.returncode == 1
    assert "--model NAME" in refused.stdout
    assert "--project NAME" not in refused.stdout


@pytest.mark.slow
def test_before_anything_has_run_the_base_model_may_be_changed(project: Project) -> None:
    end(project.up())
    output = end(project.up("--base-model", str(perturbed(project))))
    assert "which nothing has run on yet" in output


@pytest.mark.slow
def test_a_project_of_before_takes_up_its_base_model_and_says_so(project: Project) -> None:
    project.state.mkdir(parents=True)
    store = open_store(f"sqlite:///{project.state / 'store.db'}")
    store.policies.register_base("policy", "policy@0")
    store.close()
    record_something(project)
    output = end(project.up())
    assert "none was recorded for policy; it is now " in output
    refused = project.run("up", "--base-model", str(perturbed(project)))
    assert "is another model" in refused.stdout


def test_a_run_that_names_another_base_model_than_the_running_project_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    url, model = "http://127.0.0.1:9/v1", str(project.folder / "model")
    running = {"pid": 9, "ready": True, "base_model": model, "base_url": url, "vllm_url": "http://127.0.0.1:9"}
    monkeypatch.setattr(up, "read_run_state", lambda _: running)

    def attach(base_model: str | None) -> str:
        settings = load_agent(None, {("base_model",): ("base_model=", base_model)})
        with up.attach_or_start(settings) as services:
            return services.base_url

    assert (attach(None), attach("./model")) == (url, url)
    with pytest.raises(CliError, match=rf"base model {model} \(pid 9\), not with Qwen/Qwen3-4B: leave --base-model"):
        attach("Qwen/Qwen3-4B")


ANSWERS = {"acme/gated": (401, "GatedRepo"), "acme/empty": (404, "EntryNotFound"), "acme/right": (200, "")}


class Hub(BaseHTTPRequestHandler):
    """Knows the models of ANSWERS."""

    def do_HEAD(self) -> None:
        status, code = ANSWERS.get("/".join(self.path.split("/")[1:3]), (401, "RepoNotFound"))
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme/mispelt", "as a hub name it is no model on {hub}: correct the name"),
        ("acme/gated", "gated: accept its terms at {hub}/acme/gated and set HF_TOKEN"),
        ("acme/empty", "without config.json"),
    ],
)
def test_an_unknown_hub_name_fails_before_anything_starts(project: Project, hub: str, name: str, message: str) -> None:
    up = project.run("up", "--base-model", name, HF_ENDPOINT=hub, HF_HOME=str(project.folder), HF_HUB_OFFLINE="0")
    assert up.returncode == 1
    assert message.format(hub=hub) in up.stdout
    assert up.stdout.count("\n") == 1
    assert not (project.state / "run" / "vllm.pid").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("offline", "message"), [("1", "HF_HUB_OFFLINE is set"), ("0", "cannot be reached")])
def test_an_unreachable_hub_is_reported(project: Project, offline: str, message: str) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    home = str(project.folder)
    up = project.run("up", "--base-model", "acme/right", HF_ENDPOINT=nobody, HF_HOME=home, HF_HUB_OFFLINE=offline)
    assert up.returncode == 1
    assert message in up.stdout


@pytest.mark.slow
def test_up_notes_that_it_uses_a_hub_name(project: Project, hub: str) -> None:
    project.write(base_model="acme/right")
    up = project.up(HF_ENDPOINT=hub, HF_HOME=str(project.folder), HF_HUB_OFFLINE="0")
    up.terminate()
    output, _ = up.communicate(timeout=120)
    assert "acme/right: no such folder" in output
