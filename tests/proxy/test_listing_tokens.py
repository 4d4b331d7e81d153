"""Token ids are listed on request, up to a limit per response."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.proxy.coordinator.operator_api.routes import MAX_TOKENS
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.records import call_start, ended

REPLY = {"role": "assistant", "content": "Oslo"}
LONG = [7] * (MAX_TOKENS // 4)


def shipped(store: Store, count: int, run: str = "", **end: Any) -> list[str]:
    """Ship answered calls of one trajectory, or of one each; return their ids, the newest last."""
    names = [f"call_{place:03d}" for place in range(count)]
    for place, name in enumerate(names):
        parent: dict[str, Any] = {"parent_call": names[place - 1]} if run and place else {}
        start = call_start(name, run or f"t{place}", at=float(place), **parent)
        context = "exact" if parent else "root"
        store.calls.ship([start, ended(start, REPLY, **{"context": context, **end})])
    return names


def has_tokens(call: Any) -> bool:
    """Whether a call in a response has its tokens. Ids and logprobs are both present, or neither."""
    choice = call["choices"][0]
    present = {part is not None for part in (call["prompt_ids"], choice["token_ids"], choice["logprobs"])}
    assert len(present) == 1
    return present.pop()


@pytest.mark.slow
def test_a_list_of_calls_has_no_tokens_unless_requested(proxy: Proxy) -> None:
    shipped(proxy.store, 3)
    bare, whole = (proxy.http.get(f"/api/calls{query}").json()["data"] for query in ("", "?tokens=true"))
    assert [has_tokens(call) for call in bare + whole] == [False] * 3 + [True] * 3
    assert (whole[0]["prompt_ids"], whole[0]["choices"][0]["token_ids"]) == ([1, 2, 3], [4, 5])
    assert [call["completion_tokens"] for call in bare] == [2] * 3


def test_pages_with_many_tokens_are_shorter_and_lead_to_every_call(proxy: Proxy) -> None:
    names = shipped(proxy.store, 10, prompt=LONG)
    seen: list[str] = []
    before: dict[str, str] = {}
    sizes = []
    while True:
        page = proxy.http.get("/api/calls", params={"tokens": True, "limit": 9, **before}).json()
        assert all(map(has_tokens, page["data"]))
        seen += [call["id"] for call in page["data"]]
        sizes.append(len(page["data"]))
        if page["next"] is None:
            break
        before = {"before": page["next"]}
    assert (seen, max(sizes)) == (names[::-1], 3)


def test_one_call_is_listed_whole_however_long_it_is(proxy: Proxy) -> None:
    [name] = shipped(proxy.store, 1, prompt=LONG * 5)
    page = proxy.http.get("/api/calls?tokens=true").json()
    assert [len(call["prompt_ids"]) for call in page["data"]] == [len(LONG) * 5]
    assert len(proxy.http.get(f"/api/calls/{name}").json()["prompt_ids"]) == len(LONG) * 5


def test_a_long_trajectory_lists_the_tokens_of_its_first_calls_only(proxy: Proxy) -> None:
    names = shipped(proxy.store, 6, run="run", prompt=LONG, context="fork")
    found = proxy.http.get("/api/trajectories/run").json()
    assert [has_tokens(call) for call in found["calls"]] == [True] * 3 + [False] * 3
    assert all(has_tokens(proxy.http.get(f"/api/calls/{name}").json()) for name in names)
    assert not any(has_tokens(call) for call in proxy.http.get("/api/trajectories/run?tokens=false").json()["calls"])


def test_exact_turns_count_each_token_once(proxy: Proxy) -> None:
    for place in range(20):
        parent: dict[str, Any] = {"parent_call": f"call_{place - 1:03d}"} if place else {}
        start = call_start(f"call_{place:03d}", "run", at=float(place), **parent)
        context, total = ("exact" if place else "root"), len(LONG) + 10 * place
        end = ended(start, REPLY, prompt=[1] * 8 if place else LONG, context=context, prompt_tokens=total)
        proxy.store.calls.ship([start, end])
    found = proxy.http.get("/api/trajectories/run").json()
    assert all(has_tokens(call) for call in found["calls"])
