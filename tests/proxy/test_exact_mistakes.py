"""A client's error or a defect during a continuation: plain chat answers, and no task is left running."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.store.records import unpack_ids
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_scale_out import ScriptedScaleOut
from tests.harness.proxy.scripted_vllm import render
from tests.harness.proxy.servers import eventually
from tests.proxy.test_exact_context import CALL, FORMS, KEY, answered, ask, calls_of, converse, counted, vllm, vllm_url

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
