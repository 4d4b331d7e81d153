"""A worker's session with its coordinator begins again after a loss: nothing that was served meanwhile is unknown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker, Doubt
from ratchet.proxy.coordinator.unheard_workers import UnheardWorkers
from ratchet.proxy.coordinator.worker_sessions import WorkerSessions
from ratchet.proxy.messages import coordinator_messages as messages
from ratchet.proxy.messages.text_fingerprints import text_hash
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.worker.coordination.message_batches import MessageBatches
from ratchet.store.records import UNLINKED
from tests.harness.proxy.machines import Machines, running_machines
from tests.harness.proxy.relay import Relay
from tests.harness.proxy.servers import ProxyProcess, eventually, served, until

_TOKEN = "a secret of both machines"
_WORKER = "machine/1"


@pytest.fixture
def relay() -> Iterator[Relay]:
    running = Relay()
    yield running
    running.stop()


@pytest.fixture
def machines(tmp_path: Path, relay: Relay) -> Iterator[Machines]:
    """A machine with the coordinator, and another one whose worker reaches it through the relay."""
    with running_machines(tmp_path, workers=1, reach=relay.to) as running:
        yield running


def _ask(machine: ProxyProcess, conversation: list[dict[str, Any]]) -> httpx.Response:
    body = {"model": "agent", "messages": conversation}
    return httpx.post(f"{machine.url}/v1/chat/completions", json=body, timeout=60)


def _is_continued_or_marked(machine: ProxyProcess, conversation: list[dict[str, Any]], answer: httpx.Response) -> bool:
    """Send the next question; on a busy machine the coordinator may still be in doubt about the worker."""
    conversation += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    name = _ask(machine, conversation).headers["x-ratchet-trajectory"]
    if name == answer.headers["x-ratchet-trajectory"]:
        return True
    eventually(lambda: httpx.get(f"{machine.url}/health/backlog").json().get("unshipped_records") == 0)
    return bool(httpx.get(f"{machine.url}/api/trajectories/{name}", timeout=60).json()["purpose"] == UNLINKED)


@pytest.mark.slow
def test_an_answer_that_ends_while_the_session_begins_again_waits_until_the_coordinator_has_it(
    machines: Machines, relay: Relay
) -> None:
    here, there = machines.proxies
    conversation = [{"role": "user", "content": "Where? #tokens=8 #delay=0.5"}]
    relay.cut()
    eventually(lambda: "event=coordinator_lost" in machines.log(2))
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(_ask, there, conversation)  # placed there after 5 s, and answered 4 s later
        with pytest.raises(TimeoutError):
            pending.result(8.0)
        relay.mend(answers=1)  # the second greeting is read, and its answer is on its way
        with pytest.raises(TimeoutError):
            pending.result(2.5)
        relay.mend()
        response = pending.result(30.0)
    assert response.status_code == 200
    assert _is_continued_or_marked(here, conversation, response)


@pytest.mark.slow
def test_a_place_that_arrives_after_the_greeting_is_requested_again(machines: Machines, relay: Relay) -> None:
    here, there = machines.proxies
    conversation = [{"role": "user", "content": "Where?"}]
    relay.mend(answers=0)
    with ThreadPoolExecutor(1) as threads:
        time.sleep(1.5)  # the worker has looked for the coordinator, and gives up 5 s later: before the call does
        pending = threads.submit(_ask, there, conversation)
        eventually(lambda: "event=coordinator_lost" in machines.log(2))
        relay.mend()
        response = pending.result(30.0)
    assert response.status_code == 200
    assert _is_continued_or_marked(here, conversation, response)


class Sessions:
    """The coordinator's sessions, with a store that is read when the test says so."""

    def __init__(self) -> None:
        self.unheard, self.reads, self.may_read = UnheardWorkers([], 900.0), 0, asyncio.Event()
        admission = cast(Admission, None)  # no call is placed
        self._sessions = WorkerSessions(
            admission, CautiousLinker(900.0, 2**20, 2**20), self._read, _TOKEN, [_WORKER], self.unheard, None, None,
            CriticalTasks(),
        )  # fmt: skip
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._sessions.wrap(cast(Any, None))), base_url="http://coordinator"
        )

    async def _read(self) -> bool:
        self.reads += 1
        await self.may_read.wait()
        return True

    async def greet(self, session: str, epoch: int = 1, **values: Any) -> messages.Welcome:
        """Send a worker's greeting; return the answer."""
        hello = messages.Hello(_WORKER, session, epoch, text_hash(), **values)
        headers = {"authorization": f"Bearer {_TOKEN}"}
        response = await self._client.post(messages.PATH, content=messages.encode(hello), headers=headers)
        welcome = messages.decode_response(response.content)
        assert isinstance(welcome, messages.Welcome)
        return welcome

    async def __aenter__(self) -> Sessions:
        await self._sessions.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sessions.stop()
        await self._client.aclose()


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions() as running:
        yield running


@pytest.mark.parametrize("died", [True, False])
async def test_calls_of_a_worker_that_died_while_the_store_was_read_are_missing_until_it_is_read_again(
    sessions: Sessions, died: bool
) -> None:
    first = asyncio.create_task(sessions.greet("first"))
    await until(lambda: sessions.reads == 1)
    again = "second" if died else "first"
    second = asyncio.create_task(sessions.greet(again, 1 if died else 2))
    await asyncio.sleep(0.05)
    sessions.may_read.set()
    welcome = await second
    await first
    assert sessions.unheard.doubt() == Doubt.RECENT  # it has not been heard of since
    assert sessions.unheard.is_missing(_WORKER) is died
    await sessions.greet(again, 3, boot=welcome.boot, seen=welcome.at)
    await until(lambda: sessions.unheard.doubt() == Doubt.NONE)
    assert sessions.reads == 1 + died


async def test_a_greeting_that_arrives_late_does_not_replace_a_later_one(sessions: Sessions) -> None:
    later = asyncio.create_task(sessions.greet("first", 2, is_behind=True))
    await until(lambda: sessions.reads == 1)
    earlier = asyncio.create_task(sessions.greet("first", 1))
    await asyncio.sleep(0.05)
    sessions.may_read.set()
    await asyncio.gather(later, earlier)
    assert sessions.unheard.is_missing(_WORKER)


class HoldingCoordinator:
    """Answers greetings; a batch gets this response once `may_refuse` is set."""

    def __init__(self, status: int, refusal: bytes) -> None:
        self.batches, self.may_refuse = 0, threading.Event()
        self._response = Response(refusal, status)
        self.app = Starlette(routes=[Route(messages.PATH, self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        if not isinstance(messages.decode_request(await request.body()), messages.Batch):
            return Response(messages.encode(messages.Welcome("boot", 1.0)))
        self.batches += 1
        await asyncio.to_thread(self.may_refuse.wait)
        return self._response


@pytest.mark.parametrize(
    ("status", "refusal"), [(200, messages.encode(messages.Stranger())), (503, b"it stops")], ids=["stranger", "error"]
)
async def test_a_refused_message_of_an_earlier_epoch_ends_no_session_of_the_present_one(
    status: int, refusal: bytes
) -> None:
    coordinator, lost = HoldingCoordinator(status, refusal), asyncio.Event()
    with served(coordinator.app) as url:
        batches = MessageBatches([url], _TOKEN, _WORKER, lambda _reason, _is_gone: lost.set())
        assert await batches.greet((), (), is_behind=False)
        answer = batches.ask(messages.CaughtUp())
        await until(lambda: coordinator.batches == 1)
        assert await batches.greet((), (), is_behind=False)
        coordinator.may_refuse.set()
        assert await answer is None
        assert not lost.is_set()
        assert await batches.ask(messages.CaughtUp()) is None
        assert lost.is_set()
        await batches.close()
