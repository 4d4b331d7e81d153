"""A hub name is looked up before anything starts, on a real server that answers as the hub does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.harness.cli.project import Project
from tests.harness.ports import free_port

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
