"""Proxies of several machines with a coordinator in common: processes with journals of their own, and one store."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.harness.ports import free_port
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served


def _directly(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def start_machines(
    folder: Path,
    vllm_url: str,
    workers: int,
    machines: int,
    *,
    standby: bool = False,
    reach: Callable[[int], str] = _directly,
    **settings: Any,
) -> list[ProxyProcess]:
    """Start proxies with separate journals and one store; the first one's coordinator is that of all.

    `standby`: each one has a coordinator, of which one decides. `reach`: the URL at which the others reach the
    coordinator that listens at a port, which may be a relay's.
    """
    ports = [free_port() for _ in range(machines)]
    urls = [reach(port) for port in ports[: machines if standby else 1]]
    common = {"upstreams": [vllm_url], "workers": workers, "store": str(folder / "store.db")}
    common |= {"coordinator_token": "the secret of these machines"} | settings

    def start(number: int) -> ProxyProcess:
        listens = {"coordinator_listen": f"127.0.0.1:{ports[number]}"}
        own: dict[str, Any] = {"coordinator": urls} if number else listens
        if standby:
            own = {"coordinator": urls} | listens
        place = folder / f"machine-{number + 1}"
        place.mkdir(exist_ok=True)
        return ProxyProcess(place, **(common | own))

    with ThreadPoolExecutor(machines) as threads:  # they wait for each other
        return list(threads.map(start, range(machines)))


def is_ready(url: str) -> bool:
    """Return whether a proxy accepts calls."""
    return httpx.get(f"{url}/health/ready", timeout=60).status_code == 200


def has_shipped(url: str) -> bool:
    """Return whether all of a proxy's calls are stored."""
    return bool(httpx.get(f"{url}/health/backlog", timeout=60).json().get("unshipped_records") == 0)


class Machines:
    """Two proxies, the first with the coordinator of both, called in turn; `start_machines` has the settings."""

    def __init__(self, folder: Path, vllm_url: str, workers: int, **settings: Any) -> None:
        self._folder = folder
        self.proxies: list[ProxyProcess] = start_machines(folder, vllm_url, workers, 2, **settings)
        self._numbers = count()
        for proxy in self.proxies:
            eventually(partial(is_ready, proxy.url))

    def turn(self, messages: list[dict[str, Any]], text: str) -> str:
        """Send the next question of a conversation to the next machine; return the trajectory."""
        messages.append({"role": "user", "content": text})
        url = self.proxies[next(self._numbers) % 2].url
        body = {"model": "agent", "messages": messages}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
        return str(response.headers["x-ratchet-trajectory"])

    def log(self, machine: int) -> str:
        """The log of a machine's processes."""
        return (self._folder / f"machine-{machine}" / "proxy.log").read_text()

    def signal_coordinator(self, number: int, machine: int = 1) -> None:
        """Send a signal to the coordinator of a machine."""
        os.kill(int(re.findall(r"event=process_started name=coordinator pid=(\d+)", self.log(machine))[-1]), number)

    def deciding(self) -> int:
        """The machine whose coordinator decides."""
        return next(machine for machine in (1, 2) if "event=linking_restored" in self.log(machine))

    def start_again(self, command: Sequence[str]) -> ProxyProcess:
        """Start a proxy that was killed, with the settings in its command."""
        settings = json.loads(command[-2])  # a zero byte ends the last argument
        return ProxyProcess(Path(settings["journal"]).parent, **settings)

    def connections(self) -> int:
        """How often workers have connected to a coordinator."""
        return sum(self.log(machine).count("event=coordinator_connected") for machine in (1, 2))

    def purposes(self) -> dict[str, str]:
        """The purpose of every trajectory, once all calls are stored."""
        for proxy in self.proxies:
            eventually(partial(has_shipped, proxy.url))
        listed = httpx.get(f"{self.proxies[1].url}/api/trajectories", timeout=60).json()["data"]
        return {one["id"]: one["purpose"] for one in listed}

    def stop(self) -> None:
        """Stop the proxies."""
        for proxy in dict.fromkeys(reversed(self.proxies)):
            proxy.stop()


@contextlib.contextmanager
def running_machines(folder: Path, workers: int = 2, **settings: Any) -> Iterator[Machines]:
    """Run two machines and a scripted vLLM."""
    with served(ScriptedVllm()) as vllm:
        running = Machines(folder, vllm, workers, **settings)
        try:
            yield running
        finally:
            running.stop()
