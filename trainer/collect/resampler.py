"""Resamples: which ungrouped trajectories get some, when these are requested, and the groups that result.

Consumes single-call trajectories without peers, and sealed resamples; produces groups of an original with its
resamples. Promises: an original waits at most twice `max_wait_seconds` for an idle vLLM, and is then treated like any
ungrouped trajectory; rates are counted in the store, so a restart does not double them; a resample that cannot be
compared is dropped with its reason; a resample of a deleted original is deleted. If resampling is switched off, planned
resamples are cancelled.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import InvalidTransition, StoreError
from ratchet.store.reasons import DropReason
from ratchet.store.records import RESAMPLE, Call, Resample, Trajectory, Transcript
from ratchet.store.states import ResampleState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import BusyPeriod, VllmLoad
from ratchet.trainer.collect.grouping import PlannedGroup
from ratchet.trainer.rows.build_rows import why_untrainable
from ratchet.trainer.settings.trainer_settings import ResamplingSettings

# One resampling call: requests another answer to a recorded prompt through the proxy, and records the result.
#
# Runs in a thread of its own. Promises: the request is recorded before it is sent, so a killed trainer never sends it
# twice; nothing is sent while vLLM is busy. Only a trajectory of one answered call can be resampled, if its answer is
# trainable and its prompt and sampling parameters are fully recorded. The seed is left out: it would give the same
# answer.

KEY_VARIABLE = "RATCHET_RESAMPLE_API_KEY"
_NO_KEY = "none"
_CALL_TIMEOUT = 600.0  # seconds
_MAX_REASON = 500  # characters
_NOT_SENT = ("seed", "n")
# Parameters that may be `true`; for others the store records `true` in place of a value that was too large.
_FLAGS = ("ignore_eos", "parallel_tool_calls", "watermarking")


@dataclass(frozen=True, slots=True)
class ResamplingCallResult:
    """The result of one call. `busy`: nothing was sent; `failure`: why there is no answer.

    `other_requests` is how many requests of others vLLM ran.
    """

    busy: bool = False
    failure: str | None = None
    other_requests: int = 0


class ResamplingClient:
    """Sends the resampling calls of one alias; thread-safe. `read_load` returns vLLM's current load."""

    def __init__(
        self, store: Store, settings: ResamplingSettings, key: str | None, read_load: Callable[[], VllmLoad]
    ) -> None:
        self._store = store
        self._settings = settings
        self._read_load = read_load
        headers = {"authorization": f"Bearer {key or _NO_KEY}"}
        self._http = httpx.Client(
            timeout=_CALL_TIMEOUT, headers=headers, trust_env=False, verify=ssl.create_default_context()
        )
        self._in_flight = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections; calls in flight fail."""
        self._http.close()

    def send(self, resample: Resample) -> ResamplingCallResult:
        """Request one answer, unless vLLM is busy with others' requests.

        Raises StoreError; the result of the call is then not recorded.
        """
        before = self._in_flight
        load = self._read_load()
        if load.unknown is not None:
            return ResamplingCallResult(busy=True, failure=load.unknown)
        own = min(before, self._in_flight)
        if not load.spare(own, self._settings.max_running_requests):
            return ResamplingCallResult(busy=True, other_requests=load.running - own)
        failure, tokens = self._send(resample)
        if failure is None:
            self._store.resamples.mark_answered(resample.id, time.time(), tokens)
        else:
            self._store.resamples.mark_failed(resample.id, time.time(), failure)
        return ResamplingCallResult(failure=failure)

    def _send(self, resample: Resample) -> tuple[str | None, int]:
        """Send the request; return (why it failed or None, total tokens)."""
        recorded = self._store.trajectories.read(resample.original_id)
        call = find_single_call(recorded)
        if call is None:
            return "the trajectory continued in the meantime", 0
        if (url := self._proxy_url(resample.alias)) is None:
            return f"no proxy serves {resample.alias}; set trainer.resample.proxy_url", 0
        prompt = self._store.trajectories.messages_to(call.prompt_node)
        body = request_body(resample.alias, call, prompt, recorded.tools)
        headers = {"x-ratchet-role": call.role} if call.role else {}
        self._store.resamples.mark_requested(resample.id, time.time())
        with self._counted():
            try:
                response = self._http.post(f"{url}/t/{resample.id}/v1/chat/completions", json=body, headers=headers)
            except httpx.HTTPError as error:
                return f"the proxy at {url} does not answer ({error or type(error).__name__})", 0
        return _parse_response(response, resample.id)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def _proxy_url(self, alias: str) -> str | None:
        if self._settings.proxy_url is not None:
            return self._settings.proxy_url
        proxies = self._store.proxy_instances.running(alias, time.time() - PROXY_TIMEOUT_SECONDS)
        return next((proxy.url.rstrip("/") for proxy in proxies if proxy.url), None)


def find_single_call(recorded: Transcript) -> Call | None:
    """Return the call of a trajectory that can be resampled; None if it cannot."""
    if len(recorded.calls) != 1:
        return None
    call = recorded.calls[0]
    if call.context != "root" or call.parent_call is not None or call.dialect == "completions":
        return None
    if len(call.choices) != 1 or why_untrainable(call, call.choices[0]):
        return None
    complete = all(value is not True or name in _FLAGS for name, value in call.sampling.items())
    return call if complete and call.prompt_ids else None


def is_same_prompt(original: Call, resample: Transcript) -> bool:
    """Return whether a resample is one complete answer to exactly the original's prompt tokens."""
    call = find_single_call(resample)
    return call is not None and call.prompt_ids == original.prompt_ids


def request_body(
    alias: str, call: Call, prompt: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the chat request for another answer. `prompt` holds the recorded messages before the answer."""
    sampling = {name: value for name, value in call.sampling.items() if name not in _NOT_SENT}
    body: dict[str, Any] = {"model": alias, "messages": list(prompt), **sampling}
    return body | {"tools": list(tools)} if tools else body


def _parse_response(response: httpx.Response, name: str) -> tuple[str | None, int]:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        remedy = f"give the trainer its own in {KEY_VARIABLE} (`ratchet keys create --name resampling`)"
        return f"the proxy requires an API key: {remedy}", 0
    if response.status_code != httpx.codes.OK:
        return f"the proxy answered {response.status_code}: {response.text[:_MAX_REASON]}", 0
    if response.headers.get("x-ratchet-trajectory") != name:
        return "the proxy assigned it to another trajectory; does it use the same store?", 0
    usage: Any = response.json().get("usage") or {}
    return None, int(usage.get("total_tokens") or 0)


log = logging.getLogger(__name__)

_MINUTE = 60.0
_BUSY_PAUSE_SECONDS = 0.5
_ALARM_AFTER = 3  # failures in a row
_MAX_UNSUITABLE = 10_000  # trajectories


@dataclass(slots=True)
class ResamplingResult:
    """The groups and drops of finished resamples.

    `waiting` are trajectories that wait for resamples or were grouped here, `unmatched` got none to compare with.
    """

    groups: list[PlannedGroup] = field(default_factory=list)
    drops: list[tuple[str, DropReason]] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)
    unmatched: set[str] = field(default_factory=set)


class Resampler:
    """Resamples the ungrouped trajectories of one alias. Only the calls themselves take time, in their threads."""

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ResamplingSettings,
        *,
        min_group_size: int,
        key: str | None,
        read_load: Callable[[], VllmLoad],
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._min_group_size = min_group_size
        self._client = ResamplingClient(store, settings, key, read_load)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="resample")
        self._in_flight: dict[str, tuple[Resample, Future[ResamplingCallResult]]] = {}
        self._planned = 0  # resamples that were not sent yet
        self._originals: set[str] | None = None  # that wait for resamples; None: not read from the store yet
        self._unsuitable: dict[str, None] = {}  # trajectories that cannot be resampled
        self._not_before = 0.0
        self._failures = 0  # in a row
        self._busy_period = BusyPeriod()

    @property
    def is_waiting(self) -> bool:
        return self._originals is None or bool(self._originals or self._in_flight)

    def close(self) -> None:
        """Stop sending; calls in flight are cancelled at the next start."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def seal(self, shipped_until: float) -> None:
        if self._originals is None or self._originals:
            self._store.resamples.seal_trajectories(self._alias, shipped_until)

    def collect_results(self, sealed: Sequence[Trajectory], shipped_until: float, now: float) -> ResamplingResult:
        """Send what is planned, and return the result of what finished; `sealed` are the alias's sealed
        trajectories.
        """
        self._collect_calls(now)
        expected = self._cancel_outdated(self._expected(), now)
        result = ResamplingResult()
        for original, resamples in groupby(expected, key=lambda one: one.original_id):
            self._match(original, list(resamples), shipped_until, result)
        known = {one.id for one in expected}
        self._drop_strays([one.id for one in sealed if one.purpose == RESAMPLE], known, result)
        planned = [one for one in expected if one.state is ResampleState.PLANNED and one.id not in self._in_flight]
        self._planned = len(planned) - self._send(planned, now)
        return result

    def plan(self, ungrouped: Sequence[Trajectory], unmatched: Set[str], expired_before: float, now: float) -> set[str]:
        """Plan resamples for some ungrouped trajectories; return the ids that wait for them, or for their turn.

        A trajectory that was sealed before `expired_before` (Unix seconds) does not wait any longer.
        """
        settings, waiting = self._settings, set[str]()
        if not settings.samples:
            return waiting
        live = self._store.policies.live().get(self._alias)
        free = settings.concurrency - len(self._in_flight) - self._planned
        excluded = unmatched | self._unsuitable.keys()
        for one in sorted(ungrouped, key=lambda one: one.last_active_at, reverse=True):
            if one.calls != 1 or live is None or one.version != live.version or one.id in excluded:
                continue
            if free > 0 and self._plan(one, now):
                free -= settings.samples
                waiting.add(one.id)
            elif one.id not in self._unsuitable and (one.sealed_at or one.last_active_at) > expired_before:
                waiting.add(one.id)
        return waiting

    def _expected(self) -> list[Resample]:
        """Return the resamples of waiting originals. Only the leader plans, so one full read is enough."""
        expected = self._store.resamples.pending(self._alias, self._originals)
        self._originals = {one.original_id for one in expected}
        return expected

    def _plan(self, trajectory: Trajectory, now: float) -> bool:
        """Plan the resamples of a trajectory, if the rates allow it and it can be resampled."""
        if now < self._not_before or not self._within_rates(now):
            return False
        call = find_single_call(self._store.trajectories.read(trajectory.id))
        if call is not None:
            with contextlib.suppress(InvalidTransition):  # it had its resamples and has been forgotten here
                self._store.resamples.plan(
                    trajectory, self._settings.samples, call.prompt_tokens + call.completion_tokens, now
                )
                self._originals = {*(self._originals or ()), trajectory.id}
                return True
        while len(self._unsuitable) >= _MAX_UNSUITABLE:
            del self._unsuitable[next(iter(self._unsuitable))]
        self._unsuitable[trajectory.id] = None
        return False

    def _collect_calls(self, now: float) -> None:
        for name in [name for name, (_, future) in self._in_flight.items() if future.done()]:
            _, future = self._in_flight.pop(name)
            try:
                result = future.result()
            except StoreError as error:  # its end is not recorded: the next step cancels it
                result = ResamplingCallResult(failure=str(error))
            if result.busy:
                self._not_before = now + _BUSY_PAUSE_SECONDS
            self._update_alarm(name, result, now)

    def _update_alarm(self, name: str, result: ResamplingCallResult, now: float) -> None:
        alarm = f"resample:{self._alias}"
        if result.failure is None:
            if result.busy:
                self._alarm_if_always_busy(alarm, result.other_requests, now)
            else:
                self._failures = 0
                self._busy_period.reset()
                self._store.alarms.clear(alarm)
            return
        self._failures += 1
        log.warning("event=resample_failed resample=%s reason=%r", name, result.failure)
        if self._failures >= _ALARM_AFTER:
            reason = f"the last {self._failures} resampling calls failed: {result.failure}"
            self._store.alarms.raise_(alarm, reason)

    def _alarm_if_always_busy(self, alarm: str, other_requests: int, now: float) -> None:
        self._busy_period.record(other_requests, now)
        busy = self._busy_period.seconds(now)
        if 2 * busy >= self._settings.max_wait_seconds:  # the resamples that wait now expire soon
            load = self._busy_period.describe(self._settings.max_running_requests)
            self._store.alarms.raise_(alarm, f"vLLM was not idle for {busy:.0f} s, and no resampling call ran: {load}")

    def _cancel_outdated(self, expected: Sequence[Resample], now: float) -> list[Resample]:
        """Cancel resamples that are not needed any more; return all with their current state."""
        current = []
        live = self._store.policies.live().get(self._alias) if expected else None
        for one in expected:
            reason = self._cancel_reason(one, live.version if live else None, now)
            if reason is not None:
                self._store.resamples.mark_failed(one.id, now, reason)
                one = self._store.resamples.get(one.id)
            current.append(one)
        return current

    def _cancel_reason(self, one: Resample, live: int | None, now: float) -> str | None:
        if one.over or one.id in self._in_flight:
            return None
        if one.state is ResampleState.REQUESTED:
            return "the trainer was stopped during the call"
        if not self._settings.samples:
            return "resampling was switched off (trainer.resample.samples)"
        if one.version != live:
            return f"version {one.version} is not live any more"
        if now - one.planned_at > self._settings.max_wait_seconds:
            return f"vLLM was not idle for {self._settings.max_wait_seconds:g} s (trainer.resample.max_wait_seconds)"
        return None

    def _match(self, original: str, resamples: list[Resample], shipped_until: float, result: ResamplingResult) -> None:
        """Group an original whose resamples are finished and shipped with them, if they are comparable."""
        answered = [one for one in resamples if one.state is ResampleState.ANSWERED]
        shipped = all((one.ended_at or 0.0) < shipped_until for one in answered)
        if not shipped or not all(one.over for one in resamples):
            result.waiting.add(original)
            return
        trajectory = self._store.trajectories.get(original)
        call = find_single_call(self._store.trajectories.read(original))
        sealed = self._store.resamples.sealed_of(original)
        same_prompt = [name for name in sealed if call and is_same_prompt(call, self._store.trajectories.read(name))]
        enough = len(same_prompt) + 1 >= self._min_group_size
        if same_prompt and enough:
            result.waiting.add(original)
            result.groups.append(PlannedGroup(trajectory.group_key, self._alias, (original, *same_prompt)))
        else:
            result.unmatched.add(original)
        mismatched = [name for name in sealed if name not in same_prompt]
        result.drops += [(name, DropReason.RESAMPLE_PROMPT_MISMATCH) for name in mismatched]
        result.drops += [(name, DropReason.RESAMPLE_UNMATCHED) for name in same_prompt if not enough]

    def _drop_strays(self, sealed: Sequence[str], known: Set[str], result: ResamplingResult) -> None:
        """Drop resamples whose original does not wait any more; delete those whose original was deleted."""
        strays = [name for name in sealed if name not in known]
        originals = self._store.resamples.originals_of(strays) if strays else {}
        for name in strays:
            if name in originals:
                result.drops.append((name, DropReason.RESAMPLE_UNMATCHED))
            else:
                self._store.deletions.delete(TrajectoryFilter(id=name), "its original was deleted", timeout_seconds=0.0)

    def _send(self, planned: Sequence[Resample], now: float) -> int:
        """Start calls as far as rates and concurrency allow; return how many."""
        started = 0
        for one in planned:
            full = len(self._in_flight) >= self._settings.concurrency
            if full or now < self._not_before or not self._within_rates(now):
                break
            self._in_flight[one.id] = one, self._threads.submit(self._client.send, one)
            started += 1
        return started

    def _within_rates(self, now: float) -> bool:
        """Return whether a further call keeps to the rates. Calls in flight may not be recorded yet."""
        settings = self._settings
        spent = self._store.resamples.usage_since(self._alias, now - _MINUTE)
        tokens = spent.tokens + sum(one.tokens for one, _ in self._in_flight.values())
        within_tokens = settings.tokens_per_minute is None or tokens < settings.tokens_per_minute
        return within_tokens and spent.count + len(self._in_flight) < settings.calls_per_minute
