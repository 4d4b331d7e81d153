"""Token ids are captured in pieces: a long list gives what a short one gives, and a wrong one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.proxy.errors import UpstreamDisconnected
from ratchet.proxy.wire.capture import Capture
from ratchet.store.records import unpack_ids


def captured(ids: Any, separator: str = ",") -> Capture:
    capture = Capture("agent", asks_ids=False, asks_logprobs=False, asks_usage=False)
    answer = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    body = json.dumps({"id": "x", "choices": [answer], "prompt_token_ids": ids}, separators=(separator, ":"))
    capture.whole(body.encode())
    return capture


@pytest.mark.parametrize("separator", [",", ", ", " ,\n"])
@pytest.mark.parametrize("count", [0, 1, 10_000, 50_001])
def test_prompt_ids_of_any_number_are_captured_in_order(count: int, separator: str) -> None:
    ids = [number * 7919 % 150_000 for number in range(count)]
    capture = captured(ids, separator)
    assert unpack_ids(capture.prompt_ids) == tuple(ids)
    assert capture.prompt_tokens == count


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.5, None, "1,2", [1, 2], {"a": 1, "b": 2}])
@pytest.mark.parametrize("before", [1, 40_000])
def test_a_wrong_id_is_refused_wherever_it_stands(wrong: Any, before: int) -> None:
    with pytest.raises(UpstreamDisconnected):
        captured([*range(before), wrong, *range(before)])
