"""Mistakes during a continuation and repairs of what it gives: turn ends, stop strings, finish reasons, plain chat."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.proxy.exact import derender_fixes
from ratchet.proxy.exact.scale_out import GeneratedChoice
from ratchet.store.records import unpack_ids
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_scale_out import ScriptedScaleOut
from tests.harness.proxy.scripted_vllm import render
from tests.harness.proxy.servers import eventually
from tests.proxy.test_exact_context import CALL, FORMS, KEY, answered, ask, calls_of, converse, counted, vllm, vllm_url


def piece(text_end: str | None = None, stop: int | str | None = None) -> GeneratedChoice:
    return GeneratedChoice(0, [1], text_end, stop)


def stream(stops: tuple[str, ...], deltas: list[dict[str, Any]], stop: str | None) -> dict[str, str]:
    """Return the content and reasoning that the client assembles."""
    repair = derender_fixes.DerenderStreamFixer(stops, None)
    text = {"content": "", "reasoning": ""}
    for place, given in enumerate(deltas):
        last = place == len(deltas) - 1
        delta = repair.delta(given, piece("stop", stop) if last else piece())
        for name in text:
            text[name] += delta.get(name, "")
    return text


@pytest.mark.parametrize(
    ("finish", "stop", "kept"),
    [("stop", None, [1, 2]), ("stop", 3, [1, 2]), ("stop", "x", [1, 2, 3]), ("length", None, [1, 2, 3])],
)
def test_only_the_id_that_ended_the_answer_is_cut(finish: str, stop: int | str | None, kept: list[int]) -> None:
    assert derender_fixes.strip_turn_end(GeneratedChoice(0, [1, 2, 3], finish, stop)).token_ids == kept


def test_a_whole_text_ends_before_its_stop_string() -> None:
    message = derender_fixes.fix_message({"content": "a stop b stop", "reasoning": "stop"}, piece("stop", "stop"))
    assert (message["content"], message["reasoning"]) == ("a stop b ", "stop")
    assert (
        derender_fixes.fix_message({"content": None, "reasoning": "so stop"}, piece("stop", "stop"))["reasoning"]
        == "so "
    )


def test_an_answer_without_ids_is_empty_text() -> None:
    assert derender_fixes.fix_message(None, piece("stop")) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stream_never_shows_a_part_of_the_stop_string_that_ends_it(size: int) -> None:
    text = "one EN two END"
    deltas = [{"content": text[k : k + size]} for k in range(0, len(text), size)]
    assert stream(("END", "x"), deltas, "END")["content"] == "one EN two "
    assert stream(("END", "x"), deltas, None)["content"] == text


def test_held_back_text_is_sent_in_order_when_other_text_starts() -> None:
    text = stream(
        ("STOP",), [{"reasoning": "a th"}, {"reasoning": "ought"}, {"content": "text"}, {"content": " S"}], None
    )
    assert text == {"reasoning": "a thought", "content": "text S"}


def test_a_stop_string_of_one_letter_is_cut_too() -> None:
    assert stream(("e",), [{"content": "g"}, {"content": "ent"}], "e")["content"] == "g"


def test_a_delta_has_no_role_and_no_null_members_and_ids_as_the_engine_gives_them() -> None:
    repair = derender_fixes.DerenderStreamFixer((), None)
    call = {"index": 0, "id": "abc", "type": "function", "function": {"name": "f", "arguments": None}}
    delta = repair.delta({"role": "assistant", "content": None, "reasoning": None, "tool_calls": [call]}, piece())
    sent_call = {"index": 0, "id": "chatcmpl-tool-abc", "type": "function", "function": {"name": "f"}}
    assert delta == {"tool_calls": [sent_call]}


@pytest.mark.parametrize(
    ("engine", "tool_choice", "whole", "streamed"),
    [
        ("stop", None, "tool_calls", "tool_calls"),
        ("stop", "required", "tool_calls", "tool_calls"),
        ("stop", {"type": "function"}, "stop", "stop"),
        ("length", "auto", "tool_calls", "length"),
        ("length", "required", "length", "length"),
        ("abort", "auto", "abort", "abort"),  # plain chat hides it if nothing streams
    ],
)
def test_the_finish_reason_is_that_of_plain_chat(engine: str, tool_choice: Any, whole: str, streamed: str) -> None:
    message = {"tool_calls": [{"id": "a"}]}
    assert derender_fixes.fix_finish_reason(piece(engine), message, tool_choice) == whole
    repair = derender_fixes.DerenderStreamFixer((), tool_choice)
    repair.delta({"tool_calls": [{"index": 0}]}, piece())
    assert repair.finish(piece(engine)) == streamed


__all__ = ["vllm", "vllm_url"]  # fixtures


@pytest.mark.slow
@FORMS
def test_a_defect_before_the_first_words_is_counted_and_leaves_nothing_running(
    start: Start, vllm: ScriptedScaleOut, streamed: bool
) -> None:
    vllm.odd_words = True
    proxy = start()
    answers = converse(proxy, streamed, CALL, "#delay=0.02 #say=a.long.enough.answer.that.something.is.left")
    assert answers[-1]["content"] == "a long enough answer that something is left"
    assert [(call.context, str(call.state)) for call in calls_of(proxy)] == [("root", "answered"), ("fork", "answered")]
    assert counted(proxy, "exact_fallbacks_total") == {"internal_error": 1.0}
    assert set(counted(proxy, "upstream_in_flight").values()) == {0.0}
    if streamed:
        eventually(lambda: vllm.aborted == 1)


ODD_CALLS: list[Any] = [["x"], [3], 3, [{"function": "f"}], [{"id": "c"}], [None], {"a": 1}]


@FORMS
@pytest.mark.parametrize("calls", ODD_CALLS, ids=str)
def test_a_continuation_with_malformed_tool_calls_is_a_400(start: Start, calls: Any, streamed: bool) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#say=end")
    odd = {"role": "assistant", "content": "x", "tool_calls": calls}
    body = {"model": "agent", "messages": [*messages, odd, {"role": "user", "content": "on"}], "stream": streamed}
    answer = proxy.http.post("/v1/chat/completions", json=body, headers=KEY)
    assert answer.status_code == 400
    assert counted(proxy, "exact_fallbacks_total") == {}
    assert set(counted(proxy, "upstream_in_flight").values()) == {0.0}


@FORMS
def test_the_beginning_of_a_stopped_answer_is_rendered_again(
    start: Start, vllm: ScriptedScaleOut, streamed: bool
) -> None:
    proxy, answer = start(), "An answer that is long enough to be stopped by its user. " * 40
    messages: list[Any] = [{"role": "user", "content": f"hi #say={answer.replace(' ', '.')} #delay=0.01"}]
    with proxy.agent().chat.completions.create(model="agent", messages=messages, stream=True) as stream:
        text = ""
        while len(text) < 20:
            text += next(stream).choices[0].delta.content or ""
    eventually(lambda: vllm.aborted == 1)
    eventually(lambda: set(counted(proxy, "upstream_in_flight").values()) == {0.0})
    messages += [{"role": "assistant", "content": answer[:10]}, {"role": "user", "content": "go on #say=end"}]
    ask(proxy.agent(), messages, streamed)
    stopped, call = calls_of(proxy)
    assert (call.trajectory_id, call.parent_call) == (stopped.trajectory_id, stopped.id)
    assert (call.context, unpack_ids(call.prompt_ids)) == ("fork", tuple(render(messages)))
    assert counted(proxy, "exact_splices_total") == {"answer_not_found": 1.0}


@FORMS
@pytest.mark.parametrize("count", ["2", 2.0])
def test_the_number_of_choices_is_parsed_as_vllm_parses_it(start: Start, streamed: bool, count: Any) -> None:
    proxy = start()
    messages: list[Any] = [{"role": "user", "content": f"hi {CALL}"}]
    messages += answered(ask(proxy.agent(), messages, False), "#say=end")
    body = {"model": "agent", "messages": messages, "stream": streamed, "n": count}
    answer = proxy.http.post("/v1/chat/completions", json=body, headers=KEY)
    assert answer.status_code == 200
    assert [len(call.choices) for call in calls_of(proxy)] == [1, 2]
    assert counted(proxy, "exact_splices_total") == {"spliced": 1.0}
