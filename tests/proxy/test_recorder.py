"""Messages are written once, in the begin record of the first call that has them; those that may be lost, again."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.dialects.chat import Chat
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.journal.segments import read_segment, segment_path
from ratchet.proxy.messages.link_records import AttemptKey, LinkEvidence, Placement
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.call.active_call import ANSWERED, ActiveCall, OpenCall
from ratchet.proxy.worker.call.recorder import Recorder
from ratchet.store.content.messages import link_key, link_keys
from ratchet.store.ids import new_id
from ratchet.store.records import CallEnded, CallStarted, Shipment
from tests.harness.records import TOOLS

_JOURNAL_BYTES = 2**20
_REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Oslo"}, "finish_reason": "stop"}]}


class JournalRecording:
    """A recorder with its journal on disk."""

    def __init__(self, folder: Path) -> None:
        settings = ProxySettings(store="sqlite://", journal="unused", model="agent", upstreams=["http://127.0.0.1:1"])
        self.folder = folder
        self.journal = Journal(folder, _JOURNAL_BYTES, 2**16, ProxyMetrics(), AlarmQueue())
        self._recorder = Recorder(self.journal, ProxyMetrics(), strict=True)
        self._chat = Chat(settings.bounds)
        self._linker = TrajectoryLinker(1e9)
        self._calls: dict[str, ActiveCall] = {}

    async def begin(self, *texts: str, system: str = "") -> OpenCall:
        """Begin a call with these questions."""
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": text} for text in texts]
        body = json.dumps({"model": "agent", "messages": messages, "tools": TOOLS})
        parsed = await self._chat.read(body.encode(), None)
        attempt = AttemptKey("agent", None, parsed.prompt_node, parsed.request.tools_hash)
        now = time.time()
        request = parsed.request
        link = self._linker.find_link(
            LinkEvidence(
                "agent",
                None,
                request.messages,
                parsed.keys,
                request.answer_digests,
                None,
                attempt=attempt,
                arrived_at=now,
            )
        )
        start = CallStarted(
            call_id=new_id("call"), trajectory_id=link.trajectory_id, started_at=now, alias="agent", version=0,
            dialect="chat", streamed=False, linked_by="root", prompt_node=parsed.prompt_node,
            tools_hash=parsed.request.tools_hash,
        )  # fmt: skip
        opened = self._recorder.record_begin(parsed, Placement("agent", 0, link, attempt, now, None, None), start)
        self._calls[start.call_id] = ActiveCall(parsed.request, opened, parsed.make_encoder(start), b"", 0.0)
        return opened

    async def end(self, opened: OpenCall) -> bool:
        """End a call; return whether it is durable."""
        call = self._calls.pop(opened.start.call_id)
        call.encoder.whole(json.dumps(_REPLY).encode())
        _, future = self._recorder.record_end(call, ANSWERED, 200)
        assert future is not None
        return await future

    def records(self) -> list[Shipment]:
        """What the journal's segments hold."""
        paths = (segment_path(self.folder, number) for number in sorted(self.journal.segments()))
        return [record for path in paths for record in read_segment(path, 0, 2**24).records]

    def start_of(self, opened: OpenCall) -> CallStarted:
        """The begin record of a call."""
        (found,) = (
            one for one in self.records() if isinstance(one, CallStarted) and one.call_id == opened.start.call_id
        )
        return found


@pytest.fixture
async def recording(tmp_path: Path) -> AsyncIterator[JournalRecording]:
    one = JournalRecording(tmp_path / "journal")
    await one.journal.start()
    yield one
    await one.journal.stop()


async def test_messages_and_tools_are_written_once(recording: JournalRecording) -> None:
    first = await recording.begin("Where?")
    assert await recording.end(first)
    second = await recording.begin("Where?")
    assert await recording.end(second)
    assert [node.role for node in recording.start_of(first).nodes] == ["user"]
    assert recording.start_of(first).tools
    assert (recording.start_of(second).nodes, recording.start_of(second).tools) == ((), b"")
    ends = [one for one in recording.records() if isinstance(one, CallEnded)]
    assert [(end.start.nodes, end.start.tools) for end in ends] == [((), b"")] * 2
    assert [node.role for end in ends for node in end.nodes] == ["assistant"] * 2


async def test_messages_of_a_beginning_that_was_dropped_are_written_again(recording: JournalRecording) -> None:
    """Disk and memory were full when a call began: that its end is durable proves nothing about its messages."""
    filler = "x" * (_JOURNAL_BYTES - 4096)
    assert await recording.end(await recording.begin(filler))
    while await recording.end(await recording.begin(filler)):
        pass
    dropped = await recording.begin("Where?")
    huge = await recording.begin("x" * 2**25)  # more than is kept in memory
    assert not await recording.end(huge)
    assert recording.journal.records_lost > 0
    recording.journal.remove_segment(min(recording.journal.segments()))  # as if it were in the store
    assert await recording.end(dropped)
    again = await recording.begin("Where?")
    assert await recording.end(again)
    assert dropped.start.call_id not in {one.call_id for one in recording.records() if isinstance(one, CallStarted)}
    assert [node.role for node in recording.start_of(again).nodes] == ["user"]


async def test_the_end_has_the_key_of_its_answer_without_a_reminder(recording: JournalRecording) -> None:
    opened = await recording.begin("Where?", "It is 12:01.")
    assert await recording.end(opened)
    (end,) = (one for one in recording.records() if isinstance(one, CallEnded))
    before = link_keys([{"role": "user", "content": "Where?"}])[-1]
    assert end.choices[0].skip_last_key == link_key(before, {"role": "assistant", "content": "Oslo"})


async def test_the_only_message_after_the_systems_is_no_reminder(recording: JournalRecording) -> None:
    """Without it, all conversations of an agent would be alike."""
    assert await recording.end(await recording.begin("Where?", system="You search."))
    (end,) = (one for one in recording.records() if isinstance(one, CallEnded))
    assert end.choices[0].skip_last_key is None
