"""One of the two machines: a proxy with workers and a coordinator, and a scripted vLLM, in a network namespace."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from ratchet.proxy.api_keys import hash_key
from tests.harness.partitions.network import DATABASE, MACHINES, Network
from tests.harness.ports import free_port
from tests.harness.proxy.servers import ROOT, ProxyProcess

OPERATOR_KEY = "operator"
_COORDINATOR_PORT = 8009


class FailingMachine:
    """A machine whose processes can be killed. Its addresses, and its journal, outlive them."""

    def __init__(self, network: Network, name: str, folder: Path, store: str, workers: int, settings: Any) -> None:
        self.name = name
        self._network = network
        self._workers = workers
        self._folder = folder / name
        self._folder.mkdir()
        port, vllm = free_port(), free_port()
        self.url = f"http://{network.address(name)}:{port}"
        prefix = network.prefix(name)
        command = [*prefix, sys.executable, "-m", "tests.harness.proxy.scripted_vllm", str(vllm)]
        self._vllm = subprocess.Popen(command, cwd=ROOT)
        self._settings = {
            "upstreams": [f"http://127.0.0.1:{vllm}"],
            "host": network.address(name),
            "port": port,
            "workers": workers,
            "store": store,
            "command": prefix,
            **settings,
        }
        self._proxy: ProxyProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether the proxy was started, and not killed since."""
        return self._proxy is not None

    def start(self) -> None:
        """Start the proxy. Raises AssertionError if it cannot start now."""
        self._proxy = ProxyProcess(self._folder, **self._settings)

    def processes(self) -> dict[str, psutil.Process]:
        """Return the workers and the coordinator that run, by name."""
        if self._proxy is None:
            return {}
        with contextlib.suppress(psutil.NoSuchProcess):
            running = {child.pid: child for child in psutil.Process(self._proxy.pid).children()}
            started = re.findall(r"event=process_started name=(\S+) pid=(\d+)", self.log())
            return {name: running[int(pid)] for name, pid in started if int(pid) in running}
        return {}

    def decides(self) -> bool:
        """Whether the machine's coordinator is the one that decided last, as far as its log says."""
        log = self.log()
        return log.rfind("event=linking_restored") > log.rfind("name=coordinator pid=")

    def kill_process(self, name: str) -> bool:
        """`kill -9` of a worker or the coordinator; return whether it ran."""
        process = self.processes().get(name)
        if process is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        return True

    def kill(self) -> None:
        """`kill -9` of all processes of the proxy."""
        assert self._proxy is not None
        children = self.processes().values()
        self._proxy.kill()
        psutil.wait_procs(list(children), 20)  # they end with it
        self._proxy = None

    def has_shipped(self) -> bool:
        """Whether the store has everything that this machine recorded."""
        with contextlib.suppress(httpx.TransportError):
            return bool(httpx.get(f"{self.url}/health/backlog", timeout=60).json().get("unshipped_records") == 0)
        return False

    def is_whole(self) -> bool:
        """Whether every worker serves and has a coordinator."""
        with contextlib.suppress(httpx.TransportError):
            key = {"authorization": f"Bearer {OPERATOR_KEY}"}
            metrics = httpx.get(f"{self.url}/metrics", headers=key, timeout=60).text
            return len(re.findall(r"^ratchet_coordinator_up\{.*\} 1", metrics, re.MULTILINE)) == self._workers
        return False

    def log(self) -> str:
        """Everything that its processes have logged."""
        return (self._folder / "proxy.log").read_text()

    def stop(self) -> int:
        """Stop the proxy cleanly; return its status."""
        assert self._proxy is not None
        proxy, self._proxy = self._proxy, None
        return proxy.stop()

    def remove(self) -> None:
        """End whatever runs."""
        if self._proxy is not None:
            self.kill()
        self._vllm.kill()
        self._vllm.wait(60)


def make_machines(
    network: Network, folder: Path, stores: dict[str, str], workers: int, *, standby: bool, key_hashes: list[str]
) -> list[FailingMachine]:
    """Return the two machines, not yet started. `standby`: both have a coordinator; else the first one only.

    `stores`: the store's URL from each machine.
    """
    first, second = MACHINES
    ports = [_COORDINATOR_PORT, _COORDINATOR_PORT] if network.has_links else [free_port(), free_port()]
    addresses = [f"{network.address(one, far)}:{port}" for one, far, port in
                 ((first, second, ports[0]), (second, first, ports[1]))]  # fmt: skip
    urls = [f"http://{address}" for address in addresses]
    machines = []
    for number, name in enumerate(MACHINES):
        own: dict[str, Any] = {"coordinator": urls[:1]} if number else {"coordinator_listen": addresses[0]}
        if standby:
            own = {"coordinator": urls, "coordinator_listen": addresses[number]}
        own |= {"coordinator_token": "the secret of these machines", "key_hashes": key_hashes}
        own["operator_hashes"] = [hash_key(OPERATOR_KEY.encode())]
        machines.append(FailingMachine(network, name, folder, stores[name], workers, own))
    return machines


def store_urls(network: Network, url: str) -> dict[str, str]:
    """Return the URL of a PostgreSQL at the database's node from each machine; `url` is the caller's."""
    if not network.has_links:
        return dict.fromkeys(MACHINES, url)
    return {name: f"postgresql://postgres@{network.address(DATABASE, name)}:5432/postgres" for name in MACHINES}
