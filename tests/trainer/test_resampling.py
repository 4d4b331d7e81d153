"""Resamples: a single-call prompt is asked again off the users' path, and what comes of it is a group like any
other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import InvalidTransition
from ratchet.store.records import Trajectory
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmLoad, load_of
from ratchet.trainer.advantages import ScoreHistory
from ratchet.trainer.collect.collector import RoleResolver, TrajectoryCollector
from ratchet.trainer.collect.resampler import KEY_VARIABLE, find_single_call, request_body
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.records import TOOLS, answered_trajectory, call_start, ended
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.whole_circle import all_shipped, proxy_before, trainer_of
from tests.proxy.test_keys import bearer, made

QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "why? #say=so"},
]
QUICKLY: dict[str, Any] = {
    "judge": "tests.harness.trainer.judge_samples:originals_first",
    "seal_after_idle_seconds": 0.05, "group_wait_seconds": 0.05,
}  # fmt: skip


class FickleVllm(ScriptedVllm):
    """Says something else every time: of equal answers nothing can be learnt."""

    def _words(self, script: Mapping[str, str]) -> str:
        return "so " * len(self.calls)


@contextmanager
def running_proxy(store: Store, folder: Path, **settings: Any) -> Iterator[tuple[Proxy, ScriptedVllm]]:
    vllm = ScriptedVllm("base")
    with served(vllm) as url, running(url, store, folder, **settings) as proxy:
        yield proxy, vllm


def settings_of(folder: Path, engine: ScriptedEngine, proxy: str | None, **resample: Any) -> TrainerSettings:
    values: dict[str, Any] = {
        "store": str(folder / "store.db"), "model": "agent", "base_model": "base", "vllm": (engine.url,),
        "checkpoints": folder / "checkpoints", "resample": {"samples": 2, "proxy_url": proxy, **resample},
    }  # fmt: skip
    return TrainerSettings(**QUICKLY, **values)


class ResamplingTrainer:
    """The trainer's assembly alone, as the controller turns it."""

    def __init__(self, store: Store, settings: TrainerSettings) -> None:
        self._store = store
        self._settings = settings
        self.assembly = TrajectoryCollector(
            store, settings, RoleResolver(store, "agent", Roles()), ScoreHistory(), None
        )

    def step(self) -> None:
        now = time.time()
        shipped = self._store.proxy_instances.shipped_until("agent", now, since=now - 60)
        self._store.trajectories.seal_idle_trajectories("agent", shipped, self._settings.seal_after_idle_seconds)
        self.assembly.step(now, shipped)

    def until(self, claim: Callable[[], Any], seconds: float = 60.0) -> Any:
        def turned() -> Any:
            self.step()
            return claim()

        return eventually(turned, seconds)


@pytest.fixture
def line(store: Store, tmp_path: Path, engine: ScriptedEngine) -> Iterator[Callable[..., ResamplingTrainer]]:
    lines: list[ResamplingTrainer] = []

    def begin(proxy: Proxy, **resample: Any) -> ResamplingTrainer:
        lines.append(ResamplingTrainer(store, settings_of(tmp_path, engine, proxy.url, **resample)))
        return lines[-1]

    yield begin
    for one in lines:
        one.assembly.close()


def ask(proxy: Proxy, headers: dict[str, str] | None = None, **changes: Any) -> str:
    """Ask once, as an agent does; return the trajectory."""
    body = {"model": "agent", "messages": QUESTION, "temperature": 0.9, "seed": 7} | changes
    answer = proxy.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    proxy.settled()
    return answer.headers["x-ratchet-trajectory"]


def dropped_as(store: Store, name: str, reason: str) -> bool:
    return store.trajectories.get(name).drop_reason == reason


def runs(store: Store, purpose: str = "resample") -> list[Trajectory]:
    return [run for run in store.trajectories.page() if run.purpose == purpose]


@pytest.mark.slow
def test_an_ungrouped_trajectory_is_trained_with_its_resamples_and_nobody_else_sees_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    with proxy_before(FickleVllm(), tmp_path) as proxy:
        with openai.OpenAI(base_url=proxy + "/v1", api_key="an-agents-key", max_retries=0) as agent:
            labels = {"x-ratchet-task": "mail/7", "x-ratchet-role": "clerk"}
            body: Any = {"model": "agent", "messages": QUESTION, "tools": TOOLS, "temperature": 0.7}
            agent.chat.completions.create(**body, extra_headers=labels)
            all_shipped(proxy)
            # Without a URL the proxy is found by its registration.
            with trainer_of(tmp_path, tiny_model, resample={"samples": 2}, **QUICKLY) as (controller, store, _):
                eventually(lambda: controller.step(time.time()) and store.rounds.newest_committed("agent"), 60)
                original = compared(store)
            answer = {"role": "assistant", "content": "so "}
            more = agent.chat.completions.with_raw_response.create(
                **body | {"messages": [*QUESTION, answer, {"role": "user", "content": "and?"}]}
            )
        counted = httpx.get(f"{proxy}/metrics", timeout=60).text
    assert more.headers["x-ratchet-trajectory"].startswith(original)
    assert 'ratchet_calls_total{alias="agent",dialect="chat",purpose="resample",state="answered"} 2.0' in counted


def compared(store: Store) -> str:
    """A live call and its two resamples are one group, and only the live one counts as traffic; returns its id."""
    (original,) = runs(store, "live")
    resamples = runs(store)
    assert len(resamples) == 2
    assert {run.state for run in (original, *resamples)} == {TrajectoryState.TRAINED}
    assert {(run.group_id, run.task, run.version) for run in resamples} == {(original.group_id, "mail/7", 0)}
    assert original.key_id is not None
    assert original.key_id not in {run.key_id for run in resamples}
    (first,) = store.trajectories.read(original.id).calls
    for run in resamples:
        (call,) = store.trajectories.read(run.id).calls
        assert (call.prompt_ids, call.role, call.sampling) == (first.prompt_ids, "clerk", {"temperature": 0.7})
    judge = store.groups.newest_judge_version("agent")
    assert [one.trajectory_id for one in store.groups.past_scores("agent", judge or "")] == [original.id]
    return original.id


@pytest.mark.slow
def test_nothing_is_resampled_while_vllm_has_other_work(
    store: Store, tmp_path: Path, engine: ScriptedEngine, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, vllm):
        for load in ((1, 0), (0, 1)):
            engine.load = load
            trainer = line(proxy, max_wait_seconds=1.0)
            name = ask(proxy)
            call_count = len(vllm.calls)
            trainer.until(partial(dropped_as, store, name, "ungrouped"))
            assert len(vllm.calls) == call_count
        engine.load = (3, 0)
        hungry = line(proxy, max_wait_seconds=8.0)  # within half of it a slow machine looks twice, too
        ask(proxy)
        hungry.until(lambda: "is 0: set it to 3, or wait" in "".join(a.reason for a in store.alarms.active()))
        store.alarms.clear("resample:agent")
        engine.load = None
        trainer = line(proxy)
        name = ask(proxy)
        call_count = len(vllm.calls)
        trainer.until(store.alarms.active)
        assert "shows no vllm:num_requests_running" in store.alarms.active()[0].reason
        assert len(vllm.calls) == call_count
        trainer.assembly.close()
        engine.load = (3, 0)
        line(proxy, max_running_requests=3).until(lambda: store.trajectories.get(name).state is TrajectoryState.GROUPED)
        assert store.alarms.active() == []


@pytest.mark.slow
def test_calls_and_tokens_a_minute_are_kept_to(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, vllm):
        few = line(proxy, calls_per_minute=3, concurrency=4, samples=8)
        ask(proxy)
        few.until(lambda: len(vllm.calls) == 4)
        # Another trainer counts what this one asked for.
        again = line(proxy, calls_per_minute=3, concurrency=4, samples=8)
        for _ in range(20):
            few.step()
            again.step()
            time.sleep(0.01)
        assert len(vllm.calls) == 4
        tokens = store.resamples.usage_since("agent", 0.0).tokens
        frugal = line(proxy, tokens_per_minute=tokens, concurrency=4, samples=8)
        for _ in range(20):
            frugal.step()
        assert len(vllm.calls) == 4


@pytest.mark.slow
def test_resamples_that_a_killed_trainer_requested_are_never_repeated_and_the_rest_continues(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, vllm):
        name = ask(proxy)
        store.trajectories.seal(name, time.time())
        store.resamples.plan(store.trajectories.get(name), 3, 50, time.time())
        requested, *_ = store.resamples.pending("agent")
        store.resamples.mark_requested(requested.id, time.time())  # and here it was killed
        trainer = line(proxy)
        trainer.until(lambda: store.trajectories.get(name).state is TrajectoryState.GROUPED)
        group = store.groups.get(store.trajectories.get(name).group_id or "")
        assert len(group.members) == 3
        assert requested.id not in group.members
        assert len(vllm.calls) == 3
        assert "stopped during the call" in (store.resamples.get(requested.id).failure or "")
        answered_trajectory(store, requested.id, purpose="resample")  # it had gone out, and comes after all
        trainer.until(lambda: store.trajectories.get(requested.id).drop_reason == "resample_unmatched")


@pytest.mark.slow
def test_an_answer_to_other_prompt_tokens_is_not_compared(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, _):
        # What the engine saw is not what its template makes of the messages now.
        start = call_start("call_1", "traj_1", QUESTION, at=time.time() - 9.0, tools_hash="", tools=b"")
        store.calls.ship([ended(start, {"role": "assistant", "content": "so"}, messages=QUESTION)])
        trainer = line(proxy)
        trainer.until(lambda: store.trajectories.get("traj_1").drop_reason == "ungrouped")
        assert [run.drop_reason for run in runs(store)] == ["resample_prompt_mismatch"] * 2


@pytest.mark.slow
def test_a_held_out_prompt_is_not_resampled(store: Store, tmp_path: Path, engine: ScriptedEngine) -> None:
    with running_proxy(store, tmp_path) as (proxy, vllm):
        settings = settings_of(tmp_path, engine, proxy.url)
        gate = settings.release.model_copy(update={"held_out_share": 0.999999})
        trainer = ResamplingTrainer(store, settings.model_copy(update={"release": gate}))
        name = ask(proxy)
        trainer.until(lambda: dropped_as(store, name, "held_out"))
        trainer.assembly.close()
        assert len(vllm.calls) == 1
        assert store.trajectories.held_out_candidates("agent", "held_out", 9) == [
            name
        ]  # what candidates are tried with


@pytest.mark.slow
def test_deleting_an_original_deletes_its_resamples(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, _):
        name = ask(proxy)
        line(proxy).until(lambda: store.trajectories.get(name).state is TrajectoryState.GROUPED)
        assert store.deletions.delete(TrajectoryFilter(id=name), "asked for").trajectory_count == 3
        assert store.trajectories.page() == []
        assert store.resamples.counts("agent") == {}


def test_a_late_resample_of_a_deleted_original_is_deleted(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, _):
        orphan = "shad_of_nobody"
        answered_trajectory(store, orphan, purpose="resample")
        line(proxy).until(lambda: store.trajectories.page() == [])


@pytest.mark.slow
def test_resampling_uses_its_own_key_and_the_agents_key_pays_nothing(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_proxy(store, tmp_path) as (proxy, _):
        key, row = made(store)
        eventually(lambda: proxy.http.get("/v1/models").status_code == 401)
        ask(proxy, bearer(key))
        line(proxy, samples=3).until(store.alarms.active)
        assert KEY_VARIABLE in store.alarms.active()[0].reason
        own, own_row = made(store)
        eventually(lambda: proxy.http.get("/v1/models", headers=bearer(own)).status_code == 200)
        monkeypatch.setenv(KEY_VARIABLE, own)
        name = ask(proxy, bearer(key), messages=QUESTION[1:])
        line(proxy).until(lambda: store.trajectories.get(name).state is TrajectoryState.GROUPED)
        assert store.trajectories.get(name).key_id == row.id
        assert {run.key_id for run in runs(store)} == {own_row.id}


def test_switched_off_what_was_planned_is_given_up(
    store: Store, tmp_path: Path, line: Callable[..., ResamplingTrainer]
) -> None:
    with running_proxy(store, tmp_path) as (proxy, vllm):
        name = ask(proxy)
        store.trajectories.seal(name, time.time())
        store.resamples.plan(store.trajectories.get(name), 3, 50, time.time())
        line(proxy, samples=0).until(lambda: store.trajectories.get(name).drop_reason == "ungrouped")
        assert len(vllm.calls) == 1


def test_resamples_are_planned_once(store: Store) -> None:
    answered_trajectory(store, "a")
    run = store.trajectories.get("a")
    store.resamples.plan(run, 2, 9, 1.0)
    with pytest.raises(InvalidTransition, match="planned before"):
        store.resamples.plan(run, 2, 9, 1.0)


def test_the_load_of_all_replicas_counts_and_silence_is_no_idleness(engine: ScriptedEngine) -> None:
    engine.load = (2, 1)
    assert load_of([engine.url, engine.url], None) == VllmLoad(4, 2)
    assert VllmLoad(3, 0).spare(own=2, max_running_requests=1)
    assert not VllmLoad(3, 0).spare(own=1, max_running_requests=1)
    assert not VllmLoad(0, 1).spare(own=1, max_running_requests=9)
    silent = load_of([engine.url, "http://127.0.0.1:1"], None)
    assert not silent.spare(own=0, max_running_requests=9)


REFUSED: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"temperature": 0}},
    "constrained": {"sampling": {"temperature": 1.0, "tool_choice": "required"}},
    "a parameter that is not on record": {"sampling": {"temperature": 1.0, "stop": True}},
    "text": {"dialect": "completions"},
    "a continuation": {"parent_call": "call_0"},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_a_call_that_cannot_be_repeated_exactly_is_not_resampled(store: Store, changes: dict[str, Any]) -> None:
    answered_trajectory(store, "a", **changes)
    assert find_single_call(store.trajectories.read("a")) is None


def test_several_calls_several_answers_and_redacted_text_are_not_resampled(store: Store) -> None:
    answered_trajectory(store, "a")
    recorded = store.trajectories.read("a")
    assert find_single_call(recorded) is not None
    start = call_start("call_2", "a", at=2.0)
    store.calls.ship([ended(start, {"role": "assistant", "content": "again"})])
    assert find_single_call(store.trajectories.read("a")) is None
    start = call_start("call_3", "b")
    store.calls.ship([ended(start, {"role": "assistant", "content": "x"}, untrainable="redacted", prompt_ids=b"")])
    assert find_single_call(store.trajectories.read("b")) is None


def test_a_seed_is_not_sent_again_and_tools_are_in_the_agents_own_order(store: Store) -> None:
    answered_trajectory(store, "a", sampling={"temperature": 0.5, "seed": 3, "n": 1})
    recorded = store.trajectories.read("a")
    call = find_single_call(recorded)
    assert call is not None
    sent = request_body("agent", call, recorded.messages[:-1], recorded.tools)
    assert sent == {"model": "agent", "messages": list(recorded.messages[:-1]), "temperature": 0.5, "tools": TOOLS}
    assert [list(tool) for tool in sent["tools"]] == [list(tool) for tool in TOOLS]
