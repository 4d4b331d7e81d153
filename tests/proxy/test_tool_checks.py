"""Tool calls and results are checked against their schemas; calls that a grammar constrained are marked."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ratchet.proxy.coordinator.tool_checks.checker import ToolCallChecker, ToolCallCount, ToolCallCounters
from ratchet.proxy.coordinator.tool_checks.tool_results import result_of
from ratchet.proxy.coordinator.tool_checks.toolset import Toolset
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import Call, ToolCallCounts
from ratchet.store.states import CallState, ToolOutcome
from ratchet.store.store import Store
from ratchet.trainer.rows.build_rows import why_untrainable
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.harness.records import call_start, ended
from tests.proxy.test_metrics import value

CALL = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer", "minimum": 1}},
    "required": ["q"],
}


def tool(name: str = "search", parameters: Any = PARAMETERS) -> dict[str, Any]:
    """A tool in the chat format."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def checked(arguments: str, parameters: Any = PARAMETERS, name: str = "search") -> tuple[str, str | None]:
    """Check a call of the tool; return its outcome and detail."""
    outcome, detail = Toolset(msgspec.json.encode([tool(parameters=parameters)])).check_call(name, arguments)
    return str(outcome), detail


@pytest.mark.parametrize(
    ("arguments", "outcome", "detail"),
    [
        ('{"q": "x", "n": 2}', "valid", None),
        ('{"q": "x", "n": 0}', "schema_violation", "$.n: minimum"),
        ('{"q": 7}', "schema_violation", "$.q: type string"),
        ("{}", "schema_violation", "$: required q"),
        ('{"q": 7, "z": 1}', "schema_violation", "$.q: type string"),
        ('["x"]', "schema_violation", "$: list instead of an object"),
        ('{"q": "x", "colour": "red"}', "unexpected_argument", "$.colour"),
    ],
)
def test_arguments_are_valid_or_have_one_class_of_fault(arguments: str, outcome: str, detail: str | None) -> None:
    assert checked(arguments) == (outcome, detail)


def test_invalid_json_and_unknown_tools_have_their_own_outcomes() -> None:
    assert checked('{"q": ')[0] == checked("")[0] == "invalid_json"
    assert checked("{}", name="serach")[0] == "unknown_tool"
    assert Toolset(b"").check_call("search", "{}")[0] == ToolOutcome.UNKNOWN_TOOL
    assert Toolset(None).check_call("search", "{}")[0] == ToolOutcome.UNCHECKED


@pytest.mark.parametrize(
    ("extra", "outcome"),
    [({"additionalProperties": False}, "unexpected_argument"), ({"additionalProperties": True}, "valid"),
     ({"additionalProperties": {"type": "string"}}, "schema_violation"), ({"allOf": [{}]}, "valid"),
     ({"patternProperties": {"^z": {}}}, "valid")],
)  # fmt: skip
def test_an_argument_is_unexpected_unless_the_schema_allows_others(extra: dict[str, Any], outcome: str) -> None:
    assert checked('{"q": "x", "z": 1}', PARAMETERS | extra)[0] == outcome


@pytest.mark.parametrize("tools", [5, {"a": 1}, "search", True, None, [3, None, {"function": 4}]])
def test_anything_but_a_list_of_tools_offers_none(tools: Any) -> None:
    assert Toolset(msgspec.json.encode(tools)).check_call("search", "{}") == (ToolOutcome.UNKNOWN_TOOL, None)


def test_a_function_without_parameters_takes_none() -> None:
    assert checked("{}", None)[0] == "valid"
    assert checked('{"q": 1}', None)[0] == "unexpected_argument"
    assert checked('{"q": 1}', {"type": "object"})[0] == "valid", "an object of any kind"


def test_the_draft_that_a_schema_names_decides() -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"p": {"items": [{"type": "string"}]}}}
    assert checked('{"p": [1]}', old)[0] == "schema_violation", "a tuple in draft 7"
    assert checked('{"p": [1]}', {"properties": {"p": {"prefixItems": [{"type": "string"}]}}})[0] == "schema_violation"


def test_the_detail_of_a_fault_contains_no_value() -> None:
    schema = {"properties": {"q": {"enum": ["a"]}, "p": {"pattern": "^a$"}, "c": {"const": 1}, "m": {"maxLength": 2}}}
    secret = json.dumps(dict.fromkeys("qpcm", "a-secret"))
    assert "a-secret" not in str(checked(secret, schema)[1])


DOUBLING: dict[str, Any] = {"a0": {"type": "integer"}}
for number in range(1, 40):
    DOUBLING[f"a{number}"] = {"anyOf": [{"$ref": f"#/$defs/a{number - 1}"}] * 2}
HOSTILE = {
    "a reference to itself": {"$ref": "#"},
    "a dynamic circle": {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "$dynamicRef": "#x"}}},
    "branches that double": {"$defs": DOUBLING, "$ref": "#/$defs/a39"},
    "branches under another dialect": {
        "$defs": DOUBLING,
        "properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/$defs/a39"}},
    },
    "a pattern that backtracks": {"properties": {"a": {"pattern": r"^(?:(a|a)*b|(a|a)*c)*$"}}},
    "a name that backtracks": {"patternProperties": {r"^(?:(a|a)*b|(a|a)*c)*$": {}}, "additionalProperties": False},
    "a long pattern": {"properties": {"a": {"pattern": "a?" * 5_000 + "a" * 5_000}}},
    "no schema": {"type": "strin"},
    "not even an object": [1, 2],
    "a number": 7,
    "properties that are a list": {"properties": []},
    "a broken pattern": {"properties": {"a": {"pattern": "("}}},
    "a reference to nowhere": {"$ref": "#/$defs/none"},
    "a file": {"$ref": "file:///etc/passwd"},
    "division by nothing": {"properties": {"a": {"multipleOf": 0}}},
    "a large schema": {"properties": {f"p{number}": {"type": "string"} for number in range(5_000)}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_little_and_fails_nothing(name: str) -> None:
    body = msgspec.json.encode([tool(parameters=HOSTILE[name])])
    began = time.thread_time()
    outcome, detail = Toolset(body).check_call("search", json.dumps({"a": "a" * 60 + "d", "a" * 60 + "d": 1}))
    assert time.thread_time() - began < 5
    assert outcome == ToolOutcome.UNCHECKED
    assert detail


@pytest.mark.slow
def test_a_schema_that_is_too_costly_is_soon_skipped() -> None:
    tools = Toolset(msgspec.json.encode([tool(parameters=HOSTILE["branches that double"])]))
    began = time.thread_time()
    for _ in range(1_000):
        assert tools.check_call("search", "{}") == (ToolOutcome.UNCHECKED, "too much work")
    assert time.thread_time() - began < 10, "a thousand full attempts take far longer"


def test_hostile_arguments_cost_little() -> None:
    began = time.thread_time()
    assert checked('{"q": ' * 100_000)[0] == "unchecked", "large"
    assert checked('{"q": ' * 5_000 + "1" + "}" * 5_000)[0] in ("unchecked", "schema_violation"), "deep"
    many = json.dumps({"q": [[number % 7] for number in range(8_000)]})
    assert checked(many, {"properties": {"q": {"uniqueItems": True}}})[0] == "unchecked"
    assert checked('{"q": ' + "[" * 900 + "]" * 900 + "}")[0] == "schema_violation"
    assert time.thread_time() - began < 5


def test_a_reference_is_never_fetched(vllm: ScriptedVllm) -> None:
    with served(vllm) as url:
        for name in ("$ref", "$dynamicRef", "$schema", "$id"):
            checked("{}", {name: f"{url}/schema.json", "properties": {"a": {"$ref": f"{url}/other.json"}}})
            checked('{"a": 1}', {name: f"{url}/schema.json", "properties": {"a": {"$ref": f"{url}/other.json"}}})
    assert vllm.paths == []


@pytest.mark.parametrize(
    ("content", "result"),
    [
        ("21 degrees", "ok"),
        ('{"rows": [], "error": null}', "ok"),
        ("Error handling in Python is done with try.", "ok"),
        ("The word error is in this document; a timeout, too.", "ok"),
        ("Errors: 0", "ok"),
        ([{"type": "text", "text": "Error: no such file"}], "error"),
        ("Error: no such file", "error"),
        ("error", "error"),
        ("ToolException('x')", "error"),
        ("ValueError: x", "error"),
        ("Tool execution failed: x", "error"),
        ("Error executing tool search: x", "error"),
        ("An error occurred while running the tool. Please try again. Error: x", "error"),
        ("Traceback (most recent call last):\n  File", "error"),
        ("1 validation error: q is missing\n\nFix the errors and try again.", "error"),
        ('{"error": "no such file"}', "error"),
        ('{"isError": true, "content": []}', "error"),
        ('{"success": false}', "error"),
        ('{"status": "failed", "message": "x"}', "error"),
        ("Error: the request timed out", "timeout"),
        ("TimeoutError: 30 s", "timeout"),
        ("The tool call timed out after 30 s", "timeout"),
        ('{"error": {"message": "deadline exceeded"}}', "timeout"),
        ("", "empty"),
        (None, "empty"),
        ("  \n", "empty"),
        ("[]", "empty"),
        ("None", "empty"),
        ([], "empty"),
    ],
)
def test_failed_results_are_recognized_as_frameworks_write_them(content: Any, result: str) -> None:
    assert str(result_of({"role": "tool", "content": content})) == result


def request_with_tool(words: str, *earlier: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request with a tool."""
    return {"model": "agent", "messages": [*earlier, {"role": "user", "content": words}], "tools": [tool()], **fields}


def counts_by_tool(proxy: Proxy, **filters: Any) -> dict[str, dict[str, Any]]:
    """What the operator API counts, by tool."""
    return {row["tool"]: row for row in proxy.http.get("/api/tools", params=filters).json()["data"]}


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_and_their_results_are_counted_per_tool_and_policy(proxy: Proxy, streamed: bool) -> None:
    agent = proxy.agent()
    messages: list[Any] = [{"role": "user", "content": "#tool=search+serach"}]
    request: dict[str, Any] = {"model": "agent", "tools": [tool()]}
    if streamed:
        for _ in agent.chat.completions.create(messages=messages, stream=True, **request):
            pass
        proxy.settled()
        last = proxy.http.get("/api/calls").json()["data"][0]["trajectory_id"]
        reply = proxy.http.get(f"/api/trajectories/{last}").json()["messages"][-1]
    else:
        reply = agent.chat.completions.create(messages=messages, **request).choices[0].message.to_dict()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(reply["tool_calls"], ["Error: timed out", "Error: no such tool"], strict=True)
    ]
    messages += [reply, *results]
    agent.chat.completions.create(messages=[*messages, {"role": "user", "content": "#say=done"}], **request)
    proxy.settled()
    found = counts_by_tool(proxy, alias="agent", version=0)
    assert found["search"]["outcomes"] == {"valid": 1}
    assert found["search"]["results"] == {"timeout": 1}
    assert found["serach"]["outcomes"] == {"unknown_tool": 1}
    assert found["serach"]["results"] == {"error": 1}
    assert counts_by_tool(proxy, version=1) == {}
    assert value(proxy, "ratchet_tool_calls_total", tool="search", outcome="valid") == 1
    assert value(proxy, "ratchet_tool_calls_total", tool="(unknown)", outcome="unknown_tool") == 1
    assert value(proxy, "ratchet_tool_results_total", tool="search", result="timeout") == 1


def test_every_dialect_is_checked(proxy: Proxy) -> None:
    function = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}
    proxy.http.post("/v1/responses", json={"model": "agent", "input": "#tool=search", "tools": [function]})
    named = {"name": "search", "input_schema": {"type": "object", "properties": {"q": {"type": "integer"}}}}
    messages = [{"role": "user", "content": "#tool=search"}]
    proxy.http.post("/v1/messages", json={"model": "agent", "max_tokens": 99, "messages": messages, "tools": [named]})
    proxy.http.post(CALL, json=request_with_tool("#broken"))
    proxy.settled()
    assert counts_by_tool(proxy)["search"]["outcomes"] == {
        "unexpected_argument": 1,
        "schema_violation": 1,
        "invalid_json": 1,
    }


@pytest.mark.slow
def test_a_schema_that_cannot_be_checked_does_not_stop_the_shipping(proxy: Proxy) -> None:
    hostile = [tool(parameters=HOSTILE["branches that double"])]
    for _ in range(3):
        proxy.http.post(CALL, json=request_with_tool("#tool=search") | {"tools": hostile})
    proxy.http.post(CALL, json=request_with_tool("#tool=search"))
    proxy.settled()
    assert counts_by_tool(proxy)["search"]["outcomes"] == {"unchecked": 3, "valid": 1}


def reply(*calls: tuple[str, str]) -> dict[str, Any]:
    """An assistant message with calls of `search`: (id, arguments)."""
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "search", "arguments": arguments}}
            for name, arguments in calls
        ],
    }


def test_shipping_again_counts_nothing_again(store: Store) -> None:
    question = [{"role": "user", "content": "?"}]
    first = ended(call_start("call_1", "job", question), reply(("a", "{}"), ("b", "{}")), messages=question)
    answers = [*question, reply(("a", "{}"), ("b", "{}")), {"role": "tool", "tool_call_id": "b", "content": "fine"}]
    second = call_start("call_2", "job", answers, parent_call="call_1")
    store.calls.ship([first, second])
    once = ToolCallChecker(store).check([first, second])
    assert sorted(once, key=str) == [ToolCallCount("search", "valid", None, 2), ToolCallCount("search", None, "ok", 1)]
    assert ToolCallChecker(store).check([first, second]) == []
    assert [row.result for row in store.tools.of_call("call_1")] == [None, "ok"]
    assert store.tools.counts_by_version() == [
        ToolCallCounts(alias="agent", version=0, tool="search", calls=2, outcomes={"valid": 2}, results={"ok": 1})
    ]


def test_calls_without_an_answer_or_not_stored_are_left_out(store: Store) -> None:
    aborted = ended(call_start("call_1", "job"), reply(("a", '{"cut')), state=CallState.ABORTED)
    refused = ended(call_start("call_2", "job"), reply(("a", "{}")))
    store.calls.ship([aborted])
    assert ToolCallChecker(store).check([aborted, refused]) == []


def test_tools_that_were_shipped_earlier_are_read_from_the_store(store: Store) -> None:
    first, second = (ended(call_start(f"call_{n}", "job"), reply(("a", "{}"))) for n in (1, 2))
    store.calls.ship([first])
    later = msgspec.structs.replace(second, start=msgspec.structs.replace(second.start, tools=b""))
    store.calls.ship([later])
    assert ToolCallChecker(store).check([later]) == [ToolCallCount("search", "valid", None, 1)]


def test_clients_cannot_make_more_than_a_hundred_series() -> None:
    metrics = ProxyMetrics()
    counts = ToolCallCounters(metrics)
    counts.count(ToolCallCount(f"tool-{number}" * 50, "valid", None, 1) for number in range(5_000))
    names = {s.labels["tool"] for f in metrics.registry.collect() for s in f.samples if "tool" in s.labels}
    assert len(names) == 101
    assert max(map(len, names)) == 64
    assert metrics.registry.get_sample_value("ratchet_tool_calls_total", {"tool": "other", "outcome": "valid"}) == 4_900


def test_names_that_a_database_would_refuse_are_cleaned(store: Store) -> None:
    odd = reply(("a\0b", "{}"))
    odd["tool_calls"][0]["function"]["name"] = "sea\0rch" * 100
    end = ended(call_start("call_1", "job"), odd)
    store.calls.ship([end])
    ToolCallChecker(store).check([end])
    [row] = store.tools.of_call("call_1")
    assert (len(row.tool), "\0" in row.tool + row.tool_call_id) == (200, False)


USER: Any = [{"role": "user", "content": "hi"}]
HELD = "constrained_tool_calls"


def declared(strict: Any = None) -> dict[str, Any]:
    given = {} if strict is None else {"strict": strict}
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **given}}


def flat(strict: Any = None) -> dict[str, Any]:
    return {"type": "function", **declared(strict)["function"]}


def recorded(proxy: Proxy, body: dict[str, Any], path: str = "/v1/chat/completions") -> Call:
    answer = proxy.http.post(path, json={"model": "agent", **body})
    assert answer.status_code == 200, answer.text
    return proxy.last_call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [declared()]}, None),
        ({"tools": [declared(False)]}, None),
        ({"tools": [declared(), declared(True)]}, HELD),
        ({"tools": [declared("true")]}, HELD),
        ({"tools": [declared(True)], "tool_choice": "auto"}, HELD),
        ({"tools": [declared(True)], "tool_choice": "none"}, None),
        ({"tools": [declared(True)], "tool_choice": "required"}, "constrained_sampling"),
        ({"tools": [declared()], "parallel_tool_calls": False}, HELD),
        ({"tools": [declared()], "parallel_tool_calls": 0}, HELD),
        ({"tools": [declared()], "parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, None),
    ],
)
def test_calls_that_vllm_constrains_by_default_are_not_trained(
    proxy: Proxy, fields: dict[str, Any], reason: str | None
) -> None:
    call = recorded(proxy, {"messages": USER, **fields})
    assert why_untrainable(call, call.choices[0]) == reason
    assert call.sampling.get("parallel_tool_calls") == fields.get("parallel_tool_calls")
    if reason == HELD:
        assert why_untrainable(call, call.choices[0], imitated=True) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "tools": [flat(True)]}),
        ("/v1/responses", {"input": "hi", "tools": [flat()], "parallel_tool_calls": False}),
        (
            "/v1/messages",
            {
                "messages": USER, "max_tokens": 20, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("redacted", [False, True])
def test_constrained_calls_are_marked_in_every_dialect_and_with_redaction(
    start: Start, path: str, body: dict[str, Any], redacted: bool
) -> None:
    call = recorded(start(redact=("email",) if redacted else ()), body, path)
    assert why_untrainable(call, call.choices[0]) == HELD


@pytest.mark.slow
def test_the_servers_setting_decides_which_calls_are_constrained(start: Start, tmp_path: Path) -> None:
    strict: dict[str, Any] = {"messages": USER, "tools": [declared(True)], "parallel_tool_calls": False}
    levels: dict[Any, tuple[str | None, str | None]] = {
        "off": (None, None), False: (None, None), "auto": (None, HELD), "function": (HELD, HELD),
        "parameter": (HELD, HELD),
    }  # fmt: skip
    for level, reasons in levels.items():
        proxy = start(tool_strict_level=level, journal=tmp_path / str(level))
        calls = [recorded(proxy, {"messages": USER, "tools": [declared()]}), recorded(proxy, strict)]
        assert tuple(why_untrainable(call, call.choices[0]) for call in calls) == reasons
        plain = recorded(proxy, {"messages": USER})
        assert why_untrainable(plain, plain.choices[0]) is None


def test_yaml_means_off_by_false(tmp_path: Path) -> None:
    settings = ProxySettings(
        upstreams=("http://a",), model="m", store="-", journal=tmp_path, tool_strict_level=False,
    )  # fmt: skip
    assert settings.tool_strict_level == "off"
