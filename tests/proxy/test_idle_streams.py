"""A stream that falls silent in the middle ends with an error event, in every dialect and for models of model_list."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ratchet.store.states import CallState
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.proxy.test_agents import call
from tests.proxy.test_other_models import entry

SILENT = "#say=hello.world #delay=1.5"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SILENT}]},
    "/v1/completions": {"prompt": SILENT},
    "/v1/responses": {"input": SILENT},
    "/v1/messages": {"messages": [{"role": "user", "content": SILENT}], "max_tokens": 90},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["agent", "judge"])
@pytest.mark.parametrize("path", BODIES)
def test_a_silent_stream_is_ended_and_the_setting_named(
    start: Start, vllm: ScriptedVllm, vllm_url: str, path: str, model: str
) -> None:
    hosted = entry(vllm_url + "/v1", "hosted_vllm/tiny-base", key=None)
    proxy = start(stream_idle_timeout_seconds=0.3, model_list=(hosted,))
    answer = call(proxy, model, path, stream=True, **BODIES[path])
    assert answer.status_code == 200
    assert re.search(r"0\.3 s.*stream_idle_timeout_seconds", answer.text)
    proxy.settled()
    (recorded,) = proxy.store.calls.page()
    assert (recorded.state, recorded.alias) == (CallState.FAILED, model)
    eventually(lambda: vllm.aborted)
