"""Redaction: matched text is never written to disk, and reaches the engine and the client unchanged."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.proxy.redaction.patterns import BUILT_IN, RedactionPatterns
from ratchet.proxy.settings import ProxySettings
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm

EVERY = RedactionPatterns(BUILT_IN, {"badge": r"EMP-\d{6}"})
MAIL = "jane.roe@example.org"
VALUES: Any = {"upstreams": ("http://127.0.0.1:1",), "model": "agent", "store": "s.db", "journal": Path("j")}


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("write to jane.roe+x@mail.example.org, please", "write to [email], please"),
        ("pay by 4111 1111 1111 1111 today", "pay by [card] today"),
        ("pay by 4111-1111-1111-1112 today", "pay by 4111-1111-1111-1112 today"),
        ("order 1234567890123", "order 1234567890123"),
        ("DE89 3704 0044 0532 0130 00", "[iban]"),
        ("DE89 3704 0044 0532 0130 01", "DE89 3704 0044 0532 0130 01"),
        ("call +49 170 1234567 or (415) 555-0100", "call [phone] or [phone]"),
        ("on 2024-11-05 at 10:30, 3.14159", "on 2024-11-05 at 10:30, 3.14159"),
        ("key sk-proj-aB3dE6gH9jK2mN5pQ8 and AKIAIOSFODNN7EXAMPLE", "key [secret] and [secret]"),
        ("Authorization: Bearer abcdef0123456789abcdef", "Authorization: [secret]"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB+/=\n-----END PRIVATE KEY-----", "[secret]"),
        ("badge EMP-123456", "badge [badge]"),
        ("Grüße an käthe@example.de, 東京", "Grüße an kä[email], 東京"),
        ("", ""),
    ],
)
def test_only_the_matching_part_of_a_text_is_redacted(text: str, cleaned: str) -> None:
    assert EVERY.text(text) == cleaned
    assert json.loads(EVERY.json(json.dumps({"x": [text]}, ensure_ascii=False).encode())) == {"x": [cleaned]}


def test_escaped_text_in_nested_json_is_redacted() -> None:
    inner = json.dumps({"to": MAIL}).replace("@", "\\u0040")
    assert EVERY.text(inner) == '{"to":"[email]"}'
    assert MAIL not in EVERY.text(json.dumps([inner]))
    assert EVERY.text('{"broken\\u0040') == '{"broken\\u0040'
    assert EVERY.text("[" * 5000 + '"\\n"') == "[" * 5000 + '"\\n"'


def test_keys_of_objects_are_redacted_and_numbers_stay() -> None:
    assert EVERY.json(b'{"jane@example.org":4111111111111111}') == b'{"[email]":4111111111111111}'


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*b", r"(.*a){12}x"])
def test_no_pattern_hangs_on_any_text(pattern: str) -> None:
    patterns = RedactionPatterns((), {"evil": f"{pattern}zzz"})
    began = time.thread_time()
    patterns.text("a" * 200_000 + "!")
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"redact": ["emial"]}, "'emial'.* \\(secret, email"),
        ({"redact_patterns": {"bad": "("}}, "redact_patterns: bad .* RE2 .*missing"),
        ({"redact_patterns": {"bad": "(?=x)"}}, "redact_patterns: bad .* RE2"),
        ({"redact_patterns": {"No Name": "x"}}, "the name 'No Name' must consist of a-z"),
        ({"redact_patterns": {"email": "x"}}, "differ from the built-in names"),
        ({"redact_patterns": {"all": "x*"}}, "all matches the empty text"),
        ({"redact_patterns": {"who": "user"}}, "redact_patterns: who .*'user'"),
    ],
)
def test_an_invalid_pattern_is_named_with_its_remedy(change: Any, says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ProxySettings(**(VALUES | change))
    assert re.search(says, str(refused.value))


def calls_of(messages: list[Any], **more: Any) -> list[tuple[str, Any]]:
    """Return the same question in every dialect."""
    text = messages[-1]["content"]
    chat = {"model": "agent", "messages": messages, **more}
    return [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "agent", "prompt": text, **more}),
        ("/v1/responses", {"model": "agent", "input": text, **more}),
        ("/v1/messages", {**chat, "max_tokens": 50}),
    ]


def on_disk(folder: Path) -> bytes:
    """Return all written bytes: store, journal, logs."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_redacted_message_is_not_on_disk_and_reaches_the_engine(
    start: Start, store: Store, vllm: ScriptedVllm, tmp_path: Path, streamed: bool
) -> None:
    proxy = start(redact=["email"])
    for path, body in calls_of([{"role": "user", "content": f"I am {MAIL}"}], stream=streamed):
        assert proxy.http.post(path, json=body).status_code == 200
    assert MAIL.encode() not in on_disk(tmp_path)
    proxy.settled()
    assert MAIL.encode() not in on_disk(tmp_path)
    assert sum(MAIL in json.dumps(call) for call in vllm.calls) == 4
    calls = store.calls.page()
    assert {call.dialect for call in calls} == {"chat", "completions", "responses", "messages"}
    for call in calls:
        assert (call.untrainable, call.prompt_ids, call.choices[0].token_ids, call.choices[0].logprobs) == (
            ("redacted", b"", b"", b"")
        )
        assert call.prompt_tokens > 0
        assert call.completion_tokens > 0
        assert call.choices[0].link_key == ""
        assert "I am [email]" in json.dumps(store.trajectories.read(call.trajectory_id).messages)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_is_redacted_in_the_record_and_not_for_the_client(
    start: Start, store: Store, tmp_path: Path, streamed: bool
) -> None:
    proxy = start(redact=[], redact_patterns={"code": "SESAME[0-9]+"})
    request = [{"role": "user", "content": "#say=it.is.SESAME" + "7" * 3}]
    quiet = [{"role": "user", "content": "#say=nothing"}]
    for path, body in calls_of(request, stream=streamed) + calls_of(quiet, stream=streamed):
        answer = proxy.http.post(path, json=body)
        assert answer.status_code == 200
        assert "[code]" not in answer.text
    proxy.settled()
    assert b"SESAME" not in on_disk(tmp_path)
    marks = sorted(
        (call.dialect, call.untrainable or "", bool(call.choices[0].token_ids)) for call in store.calls.page()
    )
    for dialect in ("chat", "completions", "messages", "responses"):
        assert (dialect, "redacted", False) in marks
        assert (dialect, "", True) in marks


def test_tools_arguments_and_labels_are_redacted(start: Start, store: Store, tmp_path: Path) -> None:
    proxy = start(redact=["email"])
    tool = {"name": "search", "description": f"ask {MAIL}", "parameters": {"type": "object", "properties": {}}}
    arguments = json.dumps({"to": MAIL}).replace("@", "\\u0040")
    called = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": f"mail {MAIL}"}]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": json.dumps({"sent": f"“{MAIL}”"})},
        {"role": "user", "content": "thanks"},
    ]
    headers = {"x-ratchet-tags": f"a,{MAIL}", "x-ratchet-task": MAIL, "x-ratchet-role": MAIL}
    body = {"model": "agent", "messages": messages, "stop": [MAIL], "tools": [{"type": "function", "function": tool}]}
    assert proxy.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    proxy.settled()
    assert b"jane.roe" not in on_disk(tmp_path)
    (call,) = store.calls.page()
    found = store.trajectories.read(call.trajectory_id)
    assert found.tools[0]["function"]["description"] == "ask [email]"
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert (found.trajectory.task, call.role, call.sampling["stop"]) == ("[email]", "[email]", ["[email]"])


def test_redacting_only_a_label_keeps_the_token_ids(start: Start, store: Store) -> None:
    proxy = start(redact=["email"])
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    proxy.http.post("/v1/chat/completions", json=body, headers={"x-ratchet-tags": MAIL})
    proxy.settled()
    (call,) = store.calls.page()
    assert (call.untrainable, bool(call.choices[0].token_ids)) == (None, True)


def test_errors_are_redacted(start: Start, store: Store, tmp_path: Path) -> None:
    proxy = start(redact_patterns={"failure": "scripted failure"})
    body = {"model": "agent", "messages": [{"role": "user", "content": "#status=400"}]}
    assert "scripted failure" in proxy.http.post("/v1/chat/completions", json=body).text
    proxy.settled()
    assert store.calls.page()[0].error == "[failure]"
    assert b"scripted failure" not in on_disk(tmp_path)


def test_conversations_that_differ_only_in_what_is_redacted_stay_apart(proxy_of: Proxy, store: Store) -> None:
    def turn(mail: str, *more: Any) -> str:
        messages = [{"role": "user", "content": f"#say=noted for {mail}"}, *more]
        body = {"model": "agent", "messages": messages}
        return proxy_of.http.post("/v1/chat/completions", json=body).headers["x-ratchet-trajectory"]

    more = [{"role": "assistant", "content": "noted"}, {"role": "user", "content": "and now?"}]
    one, two = turn("a@example.org"), turn("b@example.org")
    assert one != two
    assert turn("a@example.org", *more) == one
    assert turn("b@example.org", *more) == two
    proxy_of.settled()
    assert all(call.untrainable == "redacted" for call in store.calls.page())
    assert {call.context for call in store.calls.page()} == {"root", "fork"}


def test_a_call_after_a_redacted_one_is_stored_with_its_own_tokens(proxy_of: Proxy, store: Store) -> None:
    for text in (f"I am {MAIL}", "hi"):
        body = {"model": "agent", "messages": [{"role": "user", "content": text}]}
        proxy_of.http.post("/t/job/v1/chat/completions", json=body)
    proxy_of.settled()
    latest, first = store.calls.page()
    assert (first.untrainable, latest.untrainable) == ("redacted", None)
    assert len(latest.prompt_ids) == 4 * latest.prompt_tokens


def test_after_a_restart_nothing_redacted_goes_to_the_engine(
    vllm_url: str, vllm: ScriptedVllm, store: Store, tmp_path: Path
) -> None:
    request = {"model": "agent", "input": f"I am {MAIL}"}
    with running(vllm_url, store, tmp_path, redact=["email"]) as proxy:
        response = proxy.http.post("/v1/responses", json=request).json()["id"]
        proxy.settled()
    with running(vllm_url, store, tmp_path, redact=["email"]) as proxy:
        more = {"model": "agent", "input": "and?", "previous_response_id": response}
        assert proxy.http.post("/v1/responses", json=more).status_code == 404
    assert "[email]" not in json.dumps(vllm.calls)


@pytest.fixture
def proxy_of(start: Start) -> Proxy:
    return start(redact=["email"])


def test_a_large_body_is_redacted(proxy_of: Proxy, tmp_path: Path) -> None:
    content = ("lorem ipsum\n" * 50_000) + MAIL
    body = {"model": "agent", "messages": [{"role": "user", "content": content}]}
    assert proxy_of.http.post("/v1/chat/completions", json=body).status_code == 200
    proxy_of.settled()
    assert MAIL.encode() not in on_disk(tmp_path)
