"""A request whose beginning is known is read as if it were new: the same nodes, link keys, fields and refusals."""

from __future__ import annotations

import json
import os
import tracemalloc
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.wire import request_body
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.known_histories import KnownBeginning, KnownHistories, KnownHistory, MessageTraits
from ratchet.proxy.wire.message_history import History, ListLimits, MayExceedLimits, MessageReader
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.content import messages as canon

Json = dict[str, Any]

BOUNDS = BodyBounds(body=10**6, max_messages=14, max_tools=3, max_json_depth=20, max_json_values=10**6)
SYSTEM: Json = {"role": "system", "content": "SYSTEM"}
LONG = json.dumps('A "system" prompt.\n' * 1000).encode()  # in its place: long enough to be looked up
FIELDS = (
    "model",
    "sampling",
    "tools_hash",
    "tools",
    "strict_tools",
    "untrainable",
    "has_other_system",
    "leading_system",
    "plain_tool_calls",
)


class Untouched:
    """Reads bodies without any memory of earlier ones."""

    _keys = count()

    def read(self, body: bytes) -> ChatRequest:
        BOUNDS.check(body)
        return request_body.read(body, f"key_{next(self._keys)}", MessageReader(0, KnownHistories(0)))


def outcome(read: Any, *given: Any) -> ChatRequest | tuple[type, str]:
    """Return what was read, or the refusal."""
    try:
        found: ChatRequest = read(*given)
        return found
    except (ProxyError, TypeError, AttributeError, ValueError) as error:
        return type(error), str(error)


def check_same(body: bytes, found: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert found == expected
        return
    assert not isinstance(found, tuple), found
    messages = msgspec.json.decode(body)["messages"]
    assert found.hashes == tuple(node.hash for node in canon.path(messages))
    assert found.keys == canon.link_keys(messages)
    answers = [canon.link_key(canon.ANYWHERE, message) for message in messages if message.get("role") == "assistant"]
    assert canon.keys_of_digests(found.answer_digests) == answers
    assert [getattr(found, name) for name in FIELDS] == [getattr(expected, name) for name in FIELDS]
    assert found.outgoing("served") == expected.outgoing("served")
    assert found.messages[-1] == messages[-1]
    assert tuple(found.nodes) == canon.path(messages)
    assert list(found.messages) == messages


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else "[{"


marks = st.sampled_from(['},{"role"', '}, {"', "\\u0041", ""])
words = marks | st.text('ab "\\\n\té✓\U0001f600{}[],:\x1b', max_size=12)
contents = st.one_of(
    words,
    words.map(lambda text: text * 40),
    st.none(),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, words), max_size=2),
    st.just([{"type": "image_url", "image_url": {"url": "x"}}]),
    st.integers(1, 22).map(deep),
)
calls = st.builds(
    lambda name, text: {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": text}},
    st.sampled_from("fg"),
    words | st.sampled_from(['{"a": 1, "b": [{"c": 1}, {"d": 2}]}', "[" * 30 + "]" * 30]),
)
messages = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "tool", "developer"]),
        contents,
    ),
    st.builds(
        lambda content, made: {"content": content, "role": "assistant", "tool_calls": made},
        contents,
        st.lists(calls, max_size=3),
    ),
    st.builds(lambda value: {"role": "user", "unknown": value}, contents),
)
odd: st.SearchStrategy[Any] = st.sampled_from([[], 5, None, "text", {}])
tools = st.lists(
    st.builds(
        lambda name, extra: {
            "type": "function",
            "function": {"name": name, "parameters": extra, "strict": name == "g"},
        },
        st.sampled_from("fg"),
        contents,
    ),
    max_size=4,
)
separators = st.sampled_from([(",", ":"), (", ", ": "), (",", " : ")])

STEPS = ("on", "on", "on", "again", "same length", "fork", "edit", "odd", "style", "tools")


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Bodies of conversations that go on, fork, are edited and sent again, in the formats of several clients."""
    bodies: list[bytes] = []
    history: list[Any] = [SYSTEM, draw(messages)]
    offered, style, ascii_only = draw(tools), draw(separators), draw(st.booleans())
    for _ in range(draw(st.integers(2, 7))):
        step = draw(st.sampled_from(STEPS))
        if step == "on":
            history = [*history, *draw(st.lists(messages, min_size=1, max_size=3))]
        elif step == "fork":
            history = [*history[: draw(st.integers(1, len(history)))], draw(messages)]
        elif step == "edit":
            place = draw(st.integers(1, len(history) - 1)) if len(history) > 1 else 0
            history = [*history[:place], draw(messages), *history[place + 1 :]]
        elif step == "same length":
            place = draw(st.integers(1, len(history) - 1))
            changed = json.loads(json.dumps(history[place]).replace("a", "b"))
            history = [*history[:place], changed, *history[place + 1 :]]
        elif step == "style":
            style, ascii_only = draw(separators), draw(st.booleans())
        elif step == "tools":
            offered = draw(tools)
        sent = [*history, draw(odd)] if step == "odd" else history
        bodies.append(draw(body_of(sent, offered, style, ascii_only=ascii_only)))
    return bodies


@st.composite
def body_of(draw: st.DrawFn, history: Any, offered: Any, style: tuple[str, str], *, ascii_only: bool) -> bytes:
    fields = [("messages", history), ("model", "agent"), ("tools", offered), ("temperature", 0.5)]
    fields += draw(
        st.lists(
            st.tuples(
                st.sampled_from(["messages", "metadata", "stop", "input", "mod\u00e9l", "tools", "unknown"]),
                st.one_of(contents, odd, st.just(history)),
            ),
            max_size=2,
        )
    )
    if draw(st.booleans()):
        fields.reverse()
    written = (
        json.dumps(name) + style[1] + json.dumps(value, separators=style, ensure_ascii=ascii_only)
        for name, value in fields
    )
    body = "{" + style[0].join(written) + "}"
    if draw(st.integers(0, 9)) == 0:
        body = body[: draw(st.integers(0, len(body)))] + draw(st.sampled_from(["", "]", "}", '"', ",", "x", "[[[["]))
    return body.encode("utf-8", "surrogatepass")


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(conversations(), min_size=1, max_size=3), st.sampled_from([0, 2_000, 10**7]))
def test_requests_are_read_as_if_nothing_were_known(several: list[list[bytes]], memory: int) -> None:
    reader, untouched = MessageReader(memory, KnownHistories(memory)), Untouched()
    turns: list[Iterator[bytes]] = [iter(bodies) for bodies in several]
    for place in range(max(map(len, several))):
        for turn in turns:
            if (short := next(turn, None)) is not None:
                body = short.replace(b'"SYSTEM"', LONG)
                found = outcome(request_body.read_within, BOUNDS, body, f"key_{place % 2}", reader)
                check_same(body, found, outcome(untouched.read, body))


def turns(number: int) -> list[Json]:
    return [SYSTEM, *({"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(number))]


def written(history: list[Json], *more: str) -> bytes:
    fields = [f'"messages":{json.dumps(history)}', '"model":"agent"', *more]
    return ("{" + ",".join(fields) + "}").encode().replace(b'"SYSTEM"', LONG)


DEEP = json.dumps(deep(30))
MANY = json.dumps([{}] * 15)


@pytest.mark.parametrize(
    ("more", "setting"),
    [
        ([f'"unknown":{DEEP}'], "max_json_depth"),
        ([f'"unknown":{DEEP}', '"unknown":1'], "max_json_depth"),
        ([f'"tools":{DEEP}'], "max_json_depth"),
        ([f'"tools":{MANY}'], "max_tools"),
        ([f'"input":{MANY}'], "max_messages"),
        ([f'"messages":{MANY}'], "max_messages"),
    ],
)
def test_what_follows_a_known_history_is_within_the_bounds(more: list[str], setting: str) -> None:
    reader = MessageReader()
    assert request_body.read_within(BOUNDS, written(turns(4)), "key", reader).hashes
    with pytest.raises(ProxyError, match=setting):
        request_body.read_within(BOUNDS, written(turns(6), *more), "key", reader)


def test_new_messages_are_within_the_bounds() -> None:
    reader = MessageReader()
    assert request_body.read_within(BOUNDS, written(turns(10)), "key", reader).hashes
    for new in ({"role": "user", "content": deep(20)}, *turns(12)[-4:]):
        expected = "max_json_depth" if new["content"] == deep(20) else "max_messages"
        history = [*turns(10), new] if expected == "max_json_depth" else turns(14)
        with pytest.raises(ProxyError, match=expected):
            request_body.read_within(BOUNDS, written(history), "key", reader)


def test_a_list_that_is_too_long_is_not_parsed() -> None:
    reader, limits = MessageReader(), ListLimits(messages=10, depth=5)
    for length, error in ((10, msgspec.DecodeError), (11, MayExceedLimits)):  # its items are no messages
        for item in (b"1", LONG):
            with pytest.raises(error):
                reader.read(Raw(b"[%b]" % b",".join([item] * length)), "", limits)


def test_unusual_tool_calls_of_a_known_history_are_not_forgotten() -> None:
    reader = MessageReader()
    for unusual in (False, True):
        history = turns(4)
        history[2] |= {"tool_calls": "none"} if unusual else {}
        for more in ([], turns(2)[1:]):
            read = request_body.read_within(BOUNDS, written([*history, *more]), "key", reader)
            assert read.plain_tool_calls is not unusual


def test_a_history_known_from_a_proxy_with_wider_bounds_is_checked_again() -> None:
    reader, deeper = MessageReader(), BodyBounds(10**6, 14, 3, 60, 10**6)
    history = [*turns(3), {"role": "user", "content": deep(30)}]
    assert request_body.read_within(deeper, written(history), "key", reader).hashes
    with pytest.raises(ProxyError, match="max_json_depth"):
        request_body.read_within(BOUNDS, written([*history, *turns(2)[1:]]), "key", reader)


def test_a_history_of_another_key_is_not_known() -> None:
    known = KnownHistories()
    data = json.dumps(turns(5)).encode()
    known.add(known.find(data, "one"), MessageReader().read(Raw(data)).summary())
    assert known.find(data, "one").end == len(data) - 1
    assert known.find(data, "two").known is None
    assert known.find(data.replace(b"turn 1", b"turn 9"), "one").known is None


def test_a_text_that_is_reported_as_absent_is_in_no_message() -> None:
    reader = MessageReader()
    phrase = 'He phrase: "a\\b\tc" \n and left'
    history = [*turns(4), {"role": "user", "content": f"Listen. {phrase}!"}]
    for ascii_only in (True, False):
        found = reader.read(Raw(json.dumps(history, ensure_ascii=ascii_only).encode().replace(b'"SYSTEM"', LONG)))
        assert found.may_contain(phrase)
        assert not found.may_contain("He phrase nothing at all")
    parts = [{"type": "text", "text": "He phrase"}, {"type": "text", "text": " nothing at all"}]
    for other in (parts, "\x41 spelled: He phrase nothing at all"):
        data = json.dumps([*history, {"role": "user", "content": other}]).encode().replace(b"nothing", b"noth\\u0069ng")
        assert reader.read(Raw(data.replace(b'"SYSTEM"', LONG))).may_contain("He phrase nothing at all")


def random_history(length: int) -> KnownHistory:
    names = [tuple(f"b2:{uuid.uuid4().hex}" for _ in range(length)) for _ in range(2)]
    return KnownHistory(names[0], names[1], os.urandom(16 * length), MessageTraits())


def test_histories_of_a_thousand_agents_fit_into_the_memory_that_is_counted() -> None:
    known = KnownHistories()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for agent in range(1000):
            known.add(KnownBeginning(("key", agent, uuid.uuid4().bytes)), random_history(82))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(known) == 1000
    assert 0.8 * known.bytes < used < 1.2 * known.bytes < 32 * 2**20


def test_of_a_full_memory_the_beginnings_that_were_continued_are_dropped_first() -> None:
    known = KnownHistories(max_bytes=20_000)
    names = [("key", number, b"digest") for number in range(8)]
    for name in names[:4]:
        known.add(KnownBeginning(name), random_history(20))
    known.add(KnownBeginning(names[4], random_history(20), names[2]), random_history(20))
    assert names[2] not in known
    assert all(name in known for name in (names[0], names[1], names[3], names[4]))
    assert known.bytes <= 20_000


def history_of(count: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n} " * 50} for n in range(count)]


def parse(history: MessageReader, messages: list[dict[str, Any]], indent: int = 0) -> History:
    return history.read(Raw(msgspec.json.format(msgspec.json.encode(messages), indent=indent)))


def test_incremental_reading_gives_what_reading_at_once_gives() -> None:
    history = MessageReader()
    for turns_so_far in (3, 9, 9, 6):
        found = parse(history, history_of(turns_so_far))
        assert list(found.messages) == history_of(turns_so_far)
        assert tuple(found.nodes) == canon.path(history_of(turns_so_far))
        assert found.keys == canon.link_keys(history_of(turns_so_far))


def test_an_unchanged_prefix_is_not_parsed_again() -> None:
    history = MessageReader()
    before, after = parse(history, history_of(20)), parse(history, history_of(22))
    assert all(old is new for old, new in zip(before.messages, after.messages, strict=False))


def test_of_a_long_list_what_every_call_repeats_is_not_parsed_again_after_a_few_calls() -> None:
    history = MessageReader()

    def read_edited(number: int) -> list[dict[str, Any]]:
        messages = history_of(200)
        messages[150]["content"] += str(number)
        found = parse(history, messages)
        assert list(found.messages) == messages
        assert tuple(found.nodes) == canon.path(messages)
        return list(found.messages)

    before, after = [read_edited(number) for number in range(10)][-2:]
    assert [old is new for old, new in zip(before, after, strict=True)] == [True] * 150 + [False] * 50


def test_equal_messages_at_different_positions_are_distinguished() -> None:
    history = MessageReader()
    same = {"role": "user", "content": "again"}
    found = parse(history, [same, same, same])
    assert len(set(found.hashes)) == len(set(found.keys)) == 3


def test_differently_formatted_equal_messages_give_equal_nodes() -> None:
    history = MessageReader()
    assert parse(history, history_of(3)).nodes == parse(history, history_of(3), indent=2).nodes


def test_memory_is_bounded_and_histories_in_use_stay_cached() -> None:
    history = MessageReader(max_bytes=100_000)
    kept = parse(history, history_of(5)).messages[0]
    for number in range(3000):
        assert parse(history, [*history_of(5), {"role": "user", "content": f"{number} " * 20}]).messages[0] is kept
        assert len(history._current) + len(history._previous) < 1000


@pytest.mark.parametrize("sent", [b"{}", b"[1]", b'["a"]', b"[[]]", b"null", b'[{"role": 1}, "x"]'])
def test_anything_but_a_list_of_objects_is_refused(sent: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        MessageReader().read(Raw(sent))
