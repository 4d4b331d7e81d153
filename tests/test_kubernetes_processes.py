"""The commands of deploy/k8s run: migration, proxy, learner and trainer as processes, until their own probes answer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ratchet.store.db.engine import HEAD, connect, schema_version
from tests.harness.ports import free_port
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.s3 import BUCKET, S3Server
from tests.harness.trainer.tiny import build_tiny_model
from tests.test_kubernetes import K8S, _container, _environment, _probes

pytestmark = pytest.mark.slow

_KEYS = {"RATCHET_API_KEYS": "k-agents", "RATCHET_OPERATOR_KEYS": "k-operators", "RATCHET_LEARNER_TOKEN": "token",
         "RATCHET_COORDINATOR_TOKEN": "token of coordinator and proxies"}  # fmt: skip


class Pods:
    """Processes with the commands and variables of the manifests; addresses and folders are those of this machine."""

    def __init__(self, folder: Path, vllm: str, s3: S3Server) -> None:
        self.folder = folder
        self.store = f"sqlite:///{folder / 'store.db'}"
        self.ports = {name: free_port() for name in ("proxy", "coordinator", "trainer", "learner")}
        self._vllm = vllm
        self._given = {**s3.environment, **_KEYS, "RATCHET_STORE": self.store}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        settings = yaml.safe_load((K8S / "ratchet.yaml").read_text())
        settings["base_model"] = str(build_tiny_model(folder / "model"))
        settings["adapters"]["store"] = f"s3://{BUCKET}/ratchet"
        settings["proxy"] |= {"port": self.ports["proxy"], "drain_delay_seconds": 0}
        settings["proxy"]["coordinator"] = f"http://127.0.0.1:{self.ports['coordinator']}"
        settings["trainer"]["metrics_port"] = self.ports["trainer"]
        settings["learner"] |= {"port": self.ports["learner"], "url": f"http://127.0.0.1:{self.ports['learner']}"}
        (folder / "ratchet.yaml").write_text(yaml.safe_dump(settings))

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start the container of a pod."""
        changed = {"/etc/ratchet/ratchet.yaml": str(self.folder / "ratchet.yaml"), "dns+http://vllm:8000": self._vllm}
        changed["0.0.0.0:8009"] = f"127.0.0.1:{self.ports['coordinator']}"
        _, *words = _container(name)["command"]
        state = self.folder / name
        state.mkdir()
        own = {key: value.replace("/state", str(state)) for key, value in _environment(name).items()}
        environment = {**_of_this_machine(os.environ), **own, **self._of(name, own), "RATCHET_STATE_DIR": str(state)}
        with (self.folder / f"{name}.log").open("w") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "ratchet", *(changed.get(word, word) for word in words)],
                cwd=state, env=environment, stdout=log, stderr=log,
            )  # fmt: skip
        return self._running[name]

    def is_ready(self, name: str) -> bool:
        """Whether all probes of a pod succeed."""
        assert self._running[name].poll() is None, self.log(name)
        with contextlib.suppress(httpx.HTTPError):
            urls = [f"http://127.0.0.1:{self.ports[name]}{path}" for path in _probes(name)]
            return all(httpx.get(url, timeout=60).status_code == 200 for url in urls)
        return False

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> dict[str, int]:
        """End all processes as a kubelet does; return their exit codes."""
        for process in self._running.values():
            process.terminate()
        try:
            return {name: process.wait(60) for name, process in self._running.items()}
        finally:
            for process in self._running.values():
                process.kill()
                process.wait()

    def _of(self, name: str, own: Mapping[str, str]) -> dict[str, str]:
        """The variables that secrets give a pod: by name, and those of the object store as a whole."""
        sources = [source["secretRef"]["name"] for source in _container(name).get("envFrom", ())]
        whole = "ratchet-object-store" in sources
        return {key: value for key, value in self._given.items() if key in own or (whole and key.startswith("AWS_"))}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with contextlib.ExitStack() as stack:
        s3 = S3Server(tmp_path)
        stack.callback(s3.close)
        pods = Pods(tmp_path, stack.enter_context(served(ScriptedVllm())), s3)
        stack.callback(pods.stop)
        yield pods


def test_the_commands_of_all_pods_run_until_their_probes_answer_and_stop_cleanly(pods: Pods) -> None:
    assert pods.start("migrate").wait(120) == 0, pods.log("migrate")
    engine = connect(pods.store)
    assert schema_version(engine) == HEAD
    engine.dispose()
    names = ("learner", "trainer", "coordinator", "proxy")
    for name in names:
        pods.start(name)
    for name in names:
        eventually(partial(pods.is_ready, name), 180)
    body: Any = {"model": "mail", "messages": [{"role": "user", "content": "hi"}]}
    url = f"http://127.0.0.1:{pods.ports['proxy']}"
    called = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": "k-agents"}, timeout=60)
    assert called.status_code == 200, called.text
    assert httpx.get(f"{url}/api/calls", timeout=60).status_code == 401
    eventually(lambda: "event=learner_found" in pods.log("trainer"), 180)
    codes = pods.stop()
    assert set(codes.values()) == {0}, codes


def _of_this_machine(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(("RATCHET_", "AWS_"))}
