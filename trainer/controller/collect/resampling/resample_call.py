"""One shadow call: asks the proxy for another answer to a recorded prompt, and writes down how it ended.

Belongs to a thread of its own. Promises: the shadow is written down as asked before the request goes out, so that
whatever kills the trainer, it is never asked for twice; nothing is asked while vLLM is busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ratchet.store.calls.resamples import Resample
from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_load import Load
from ratchet.trainer.controller.collect.resampling import resample_request
from ratchet.trainer.settings.resampling_settings import ResamplingSettings

KEY_VARIABLE = "RATCHET_RESAMPLE_API_KEY"
_NO_KEY = "none"
_LONGEST_REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn to ask came out. `busy`: nothing was asked; `failure`: why there is no answer.

    `others` is how many calls of others vLLM ran.
    """

    busy: bool = False
    failure: str | None = None
    others: int = 0


class ResamplingClient:
    """Asks for resamples of one alias. `load` tells what vLLM does now; may be used by several threads."""

    def __init__(self, store: Store, settings: ResamplingSettings, key: str | None, load: Callable[[], Load]) -> None:
        self._store = store
        self._settings = settings
        self._load = load
        headers = {"authorization": f"Bearer {key or _NO_KEY}"}
        self._http = httpx.Client(timeout=settings.timeout_seconds, headers=headers, trust_env=False)
        self._under_way = 0  # shadow calls that vLLM may be running
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections; what is under way fails."""
        self._http.close()

    def ask(self, shadow: Resample) -> Outcome:
        """Ask for one answer, unless vLLM is busy with others' calls. Raises StoreError; then its end is not known."""
        before = self._under_way
        load = self._load()
        if load.unknown is not None:
            return Outcome(busy=True, failure=load.unknown)
        own = min(before, self._under_way)
        if not load.spare(own, self._settings.max_running_requests):
            return Outcome(busy=True, others=load.running - own)
        failure, tokens = self._asked(shadow)
        if failure is None:
            self._store.resamples.mark_answered(shadow.id, time.time(), tokens)
        else:
            self._store.resamples.mark_failed(shadow.id, time.time(), failure)
        return Outcome(failure=failure)

    def _asked(self, shadow: Resample) -> tuple[str | None, int]:
        """Send the request; return (why it failed, None where it did not; the tokens that it took)."""
        recorded = self._store.trajectories.read(shadow.original_id)
        call = resample_request.find_single_call(recorded)
        if call is None:
            return "the trajectory went on meanwhile", 0
        if (url := self._proxy(shadow.alias)) is None:
            return f"no proxy serves {shadow.alias} now; set trainer.resample.proxy_url", 0
        prompt = self._store.trajectories.messages_to(call.prompt_node)
        content = resample_request.body(shadow.alias, call, prompt, recorded.tools)
        headers = {"x-ratchet-role": call.role} if call.role else {}
        self._store.resamples.mark_requested(shadow.id, time.time())
        with self._running():
            try:
                answer = self._http.post(f"{url}/t/{shadow.id}/v1/chat/completions", json=content, headers=headers)
            except httpx.HTTPError as error:
                return f"the proxy at {url} does not answer ({error or type(error).__name__})", 0
        return _read(answer, shadow.id)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def _proxy(self, alias: str) -> str | None:
        if self._settings.proxy_url is not None:
            return self._settings.proxy_url
        instances = self._store.proxy_instances.running(alias, time.time() - PROXY_TIMEOUT_SECONDS)
        return next((instance.url.rstrip("/") for instance in instances if instance.url), None)


def _read(answer: httpx.Response, name: str) -> tuple[str | None, int]:
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        remedy = f"give the trainer one of its own in {KEY_VARIABLE} (`ratchet keys create --name shadow`)"
        return f"the proxy wants a key: {remedy}", 0
    if answer.status_code != httpx.codes.OK:
        return f"the proxy answered {answer.status_code}: {answer.text[:_LONGEST_REASON]}", 0
    if answer.headers.get("x-ratchet-trajectory") != name:
        return "the proxy took it for another trajectory; does it use the same store?", 0
    usage: Any = answer.json().get("usage") or {}
    return None, int(usage.get("total_tokens") or 0)
