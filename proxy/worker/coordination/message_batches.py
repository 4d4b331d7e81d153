"""Sends messages to the coordinator over HTTP: those of one turn of the event loop in one POST.

Of several coordinators one decides: a greeting goes to all, and the session is with the one that answers it.

An answer is None if the coordinator did not answer in time, or does not know the session. Belongs to the event loop's
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, UpstreamTimeout
from ratchet.proxy.messages import coordinator_messages as messages
from ratchet.proxy.messages.admission_records import EndedCall
from ratchet.proxy.messages.coordinator_messages import Answer, Answers, Goodbye, Hello, Message, Welcome
from ratchet.proxy.messages.link_records import Placement
from ratchet.proxy.messages.text_fingerprints import text_hash
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.upstreams.http_connection import ResponseLimits
from ratchet.store.access.replicas import ReplicaList
from ratchet.store.ids import new_id

log = logging.getLogger("ratchet.proxy")

_TIMEOUT = 5.0  # seconds for the answers to a batch, which the coordinator has at once
_SLOW_TIMEOUT = 30.0  # for a greeting, and for a call that the coordinator looks up in the store
_CONNECT_TIMEOUT = 1.0
_AGAIN_SECONDS = 0.1  # between greetings to a coordinator that does not decide yet
_MAX_RESPONSE_BYTES = 2**26
_MAX_POSTS = 4  # under way at once; more messages wait, and share the next one

_Waiting = tuple[bytes, "asyncio.Future[Answer | None]"]


class MessageBatches:
    """The connection to the coordinator.

    `on_failure` is called when a POST of the present epoch has failed, with the reason, and whether no coordinator
    decides at that address: its process is gone, or knows no session. Without an answer it may still decide.
    """

    def __init__(
        self, coordinators: Sequence[str], token: str, worker: str, on_failure: Callable[[str, bool], None]
    ) -> None:
        self._coordinators = ReplicaList(coordinators)
        self.url = ""  # of the coordinator that knows the session
        self.refusal = "no coordinator can be reached"  # why the last greeting failed
        self.answered_at = float("-inf")  # seconds of the event loop's clock: the last answer of a coordinator
        self.has_standby = False  # several coordinators were named at the last greeting
        self._session = new_id("session")
        self._boot = ""  # of the coordinator that knows the session
        self._seen = 0.0  # its time, as it sent it last
        self.epoch = 0  # greetings sent: none of them has what a message of an earlier epoch began
        self._worker = worker
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/msgpack"}
        self._on_failure = on_failure
        self._client = _client(_TIMEOUT)
        self._slow_client = _client(_SLOW_TIMEOUT)
        self._waiting: list[_Waiting] = []
        self._posts = 0
        self._is_scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, message: Message, *, alone: bool = False) -> asyncio.Future[Answer | None]:
        """Send a message; return the future of its answer. `alone`: its answer may take long.

        Raises OverflowError for a message with an integer that MessagePack does not have.
        """
        loop = asyncio.get_running_loop()
        entry: _Waiting = (messages.encode(message), loop.create_future())
        if alone:
            self._start_post([entry], self._slow_client)
            return entry[1]
        self._waiting.append(entry)
        if not self._is_scheduled and self._posts < _MAX_POSTS:
            self._is_scheduled = True
            loop.call_soon(self._flush)
        return entry[1]

    async def greet(self, open_calls: Iterable[Placement], ended: Iterable[EndedCall], *, is_behind: bool) -> bool:
        """Begin or continue the session; return whether a coordinator answered."""
        self.epoch += 1
        hello = Hello(
            self._worker, self._session, self.epoch, text_hash(), tuple(open_calls), tuple(ended), is_behind,
            self._boot, self._seen,
        )  # fmt: skip
        urls = await asyncio.to_thread(self._coordinators.resolve)
        self.has_standby = len(urls) > 1
        if not urls:
            return False
        waiting = set(urls)  # for a first answer
        greetings = [asyncio.ensure_future(self._greet_often(url, messages.encode(hello), waiting)) for url in urls]
        try:
            first, _ = await asyncio.wait(greetings, return_when=asyncio.FIRST_COMPLETED)
            found = next((answer for one in first if (answer := one.result()) is not None), None)
            if found is None:
                return False
            self.url, welcome = found
            self._boot, self._seen = welcome.boot, welcome.at
            return True
        finally:
            for one in greetings:
                one.cancel()
            await asyncio.gather(*greetings, return_exceptions=True)

    async def _greet_often(self, url: str, hello: bytes, waiting: set[str]) -> tuple[str, Welcome] | None:
        """Greet a coordinator again while the greeting to another one has no answer: that one may hang."""
        while (found := await self._greet(url, hello)) is None:
            waiting.discard(url)
            if not waiting:
                return None
            await asyncio.sleep(_AGAIN_SECONDS)
        return found

    async def _greet(self, url: str, hello: bytes) -> tuple[str, Welcome] | None:
        """Return the URL of a coordinator that answers, and its answer; None if it does not."""
        try:
            response = await self._send(url, self._slow_client, hello)
        except UpstreamError as error:
            self.refusal = str(error)
            log.debug("event=coordinator_unreachable reason=%r", self.refusal)
            return None
        return (url, response) if isinstance(response, Welcome) else None

    async def check(self) -> None:
        """Send a batch without messages: `on_failure` is called if the coordinator does not answer."""
        await self._post([], self._client)

    async def close(self) -> None:
        """Wait for the posts under way, end the session, and close the connections."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._boot:
            with contextlib.suppress(UpstreamError):
                await self._send(self.url, self._client, messages.encode(Goodbye(self._worker, self._session)))
        self._client.close()
        self._slow_client.close()

    def _flush(self) -> None:
        self._is_scheduled = False
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self._posts += 1
            task = self._start_post(batch, self._client)
            task.add_done_callback(self._on_posted)

    def _on_posted(self, _: asyncio.Task[None]) -> None:
        self._posts -= 1
        if not self._is_scheduled:
            self._flush()

    def _start_post(self, batch: list[_Waiting], client: HttpClient) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._post(batch, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _post(self, batch: list[_Waiting], client: HttpClient) -> None:
        answers: tuple[Answer | None, ...] = (None,) * len(batch)
        boot, epoch = self._boot, self.epoch
        body = _EncodedBatch(
            self._worker, self._session, boot, epoch, self._seen, [msgspec.Raw(data) for data, _ in batch]
        )
        try:
            response = await self._send(self.url, client, messages.encode(body))
            if isinstance(response, Answers) and len(response.answers) == len(batch):
                answers = response.answers
                if boot == self._boot:
                    self._seen = max(self._seen, response.at)
            elif epoch == self.epoch:
                self._on_failure("it does not know this worker's session", True)
        except UpstreamError as error:
            if epoch == self.epoch:
                self._on_failure(str(error), _is_gone(error))
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _send(self, url: str, client: HttpClient, body: bytes) -> object:
        """Return the decoded response. Raises UpstreamError."""
        try:
            response = await client.send(url, "POST", messages.PATH, body, self._headers)
            try:
                data = await response.read()
            finally:
                response.close()
        except UpstreamTimeout as error:  # its message is for an upstream
            raise UpstreamTimeout(f"the coordinator {url} did not answer in time") from error
        if response.status != 200:
            raise UpstreamError(f"the coordinator answered {response.status}: {data[:200]!r}")
        self.answered_at = asyncio.get_running_loop().time()
        try:
            return messages.decode_response(data)
        except msgspec.DecodeError as error:
            raise UpstreamError(f"the coordinator's answer is unreadable: {error}") from error


class _EncodedBatch(msgspec.Struct, tag="batch"):
    """`coordinator_messages.Batch` with encoded messages."""

    worker: str
    session: str
    boot: str
    epoch: int
    seen: float
    messages: list[msgspec.Raw]


def _is_gone(error: UpstreamError) -> bool:
    """Return whether a connection broke off or was refused: the process has ended."""
    return isinstance(error, UpstreamDisconnected) or isinstance(error.__cause__, ConnectionRefusedError)


def _client(timeout: float) -> HttpClient:
    return HttpClient(ResponseLimits(timeout, timeout, _MAX_RESPONSE_BYTES), _CONNECT_TIMEOUT, server="the coordinator")
