"""One resampling call: requests another answer to a recorded prompt through the proxy, and records the result.

Runs in a thread of its own. Promises: the request is recorded before it is sent, so a killed trainer never sends it
twice; nothing is sent while vLLM is busy. Only a trajectory of one answered call can be resampled, if its answer is
trainable and its prompt and sampling parameters are fully recorded. The seed is left out: it would give the same
answer.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.records import Call, Resample, Transcript
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmLoad
from ratchet.trainer.rows.build_rows import why_untrainable
from ratchet.trainer.settings.trainer_sections import ResamplingSettings

KEY_VARIABLE = "RATCHET_RESAMPLE_API_KEY"
_NO_KEY = "none"
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
            timeout=settings.timeout_seconds, headers=headers, trust_env=False, verify=ssl.create_default_context()
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
