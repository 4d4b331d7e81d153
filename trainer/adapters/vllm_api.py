"""vLLM's HTTP API as the trainer uses it: load, adapters, logprobs, and all replicas at once."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ratchet.store.access.replicas import ReplicaList, credentials, without_credentials
from ratchet.store.policies import fingerprints
from ratchet.trainer.adapters.adapter_store import is_remote
from ratchet.trainer.errors import (
    AdapterNotFound,
    AdapterNotServable,
    AdapterRefused,
    EngineError,
    EngineUnreachable,
    PromptLogprobsMissing,
)

# The load of vLLM: running and waiting calls of all replicas, from their Prometheus metrics.
#
# A replica that does not report its load counts as busy, with the reason. A server that answers slowly is not idle, so
# requests time out after `timeout` seconds.

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_MAX_CHECKS = 100


@dataclass(frozen=True, slots=True)
class VllmLoad:
    """Running and waiting calls of all replicas; `unknown` is the reason if they are not known."""

    running: int = 0
    waiting: int = 0
    unknown: str | None = None

    def spare(self, own: int, max_running_requests: int) -> bool:
        """Return whether another call would delay nobody; `own` of the running calls are not counted."""
        return self.unknown is None and self.waiting == 0 and self.running - own <= max_running_requests


class BusyPeriod:
    """How long vLLM has been busy at every check, and how many other calls it ran."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._others: deque[int] = deque(maxlen=_MAX_CHECKS)

    def record(self, others: int, now: float) -> None:
        self._since = now if self._since is None else self._since
        self._others.append(others)

    def reset(self) -> None:
        self._since = None
        self._others.clear()

    def seconds(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    def describe(self, max_running_requests: int) -> str:
        """Return the observed load, with the remedy."""
        few, many = min(self._others, default=0), max(self._others, default=0)
        seen = f"vLLM ran {few} to {many} other calls at {len(self._others)} checks"
        if many <= max_running_requests:
            return f"{seen}, with others waiting: it has no spare capacity; add a replica, or ask for fewer resamples"
        return (
            f"{seen}, and trainer.resample.max_running_requests is {max_running_requests}: "
            f"set it to {many}, or wait for less traffic"
        )


def load_of(urls: Sequence[str], key: str | None, timeout: float = 2.0) -> VllmLoad:
    """Return the load of the replicas at these URLs, without /v1."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    running = waiting = 0
    with httpx.Client(timeout=timeout, headers=headers, trust_env=False) as http:
        for whole in urls:
            url = without_credentials(whole)
            try:
                answer = http.get(f"{url}/metrics", auth=credentials(whole))
                gauges = _parse_gauges(answer.text) if answer.status_code == httpx.codes.OK else {}
            except (httpx.HTTPError, ValueError) as error:
                return VllmLoad(unknown=f"vLLM at {url} does not report its load ({error or type(error).__name__})")
            if RUNNING not in gauges:
                return VllmLoad(unknown=f"vLLM at {url} shows no {RUNNING} at /metrics (is --disable-log-stats set?)")
            running += gauges[RUNNING]
            waiting += gauges.get(WAITING, 0)
    return VllmLoad(running, waiting)


def _parse_gauges(text: str) -> dict[str, int]:
    """Return both gauges of a metrics page, summed over vLLM's engines."""
    sums: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name in (RUNNING, WAITING):
            sums[family.name] = round(sum(sample.value for sample in family.samples))
    return sums


# vLLM's control API: load, unload, list and score adapters of one replica over HTTP. The only client of it.
#
# HTTP errors become EngineError here. A name is never loaded twice, because vLLM keys its prefix cache by name.

_BAD_REQUEST = (400, 413, 422)
# vLLM closes idle connections after 5 s, httpx's own limit: a request sent at that moment would fail.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
# vLLM's words
_NO_FILES, _RANK, _NOT_LOADED = "No adapter found", "greater than max_lora_rank", "could not be loaded"


def list_models(url: str, key: str | None = None, timeout: float = 30.0) -> list[dict[str, Any]]:
    """Return the entries of /v1/models of a vLLM server or a proxy. Raises EngineUnreachable, AdapterRefused."""
    try:
        replica = VllmServer(url, timeout, key)
    except httpx.InvalidURL as error:
        raise EngineUnreachable(f"the URL is invalid ({error})") from error
    with contextlib.closing(replica):
        return replica.cards()


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One response: the message, why it ended, its length in tokens, and the logprobs of its tokens (nats)."""

    message: Mapping[str, Any]
    finish_reason: str | None
    tokens: int
    logprobs: tuple[float, ...]


class VllmServer:
    """One vLLM server. `key` is its API key, if it has one; `timeout` is in seconds.

    `url` is without /v1. User name and password in it are sent to the server and appear nowhere else.
    """

    def __init__(self, url: str, timeout: float = 60.0, key: str | None = None) -> None:
        self.url = without_credentials(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=self.url,
            auth=credentials(url),
            timeout=timeout,
            headers=headers,
            trust_env=False,
            verify=ssl.create_default_context(),
            limits=_LIMITS,
        )

    def close(self) -> None:
        self._http.close()

    def models(self) -> tuple[str, ...]:
        """Return the names of the served models, adapters included. Raises EngineUnreachable, AdapterRefused."""
        return tuple(card["id"] for card in self.cards())

    def cards(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models. Raises EngineUnreachable, AdapterRefused."""
        response = self._request("GET", "/v1/models")
        if response.is_error:
            raise AdapterRefused(f"{self.url} does not list its models ({response.status_code}): {response.text[:300]}")
        try:
            return [dict(card) for card in response.json()["data"] if isinstance(card["id"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise AdapterRefused(f"{self.url} does not list its models: invalid response ({error!r})") from error

    def can_load_adapters(self) -> bool:
        """Return whether adapters can be loaded at run time. Raises EngineUnreachable."""
        # Without a name a server with this route rejects the request; other servers do not know the route.
        return self._request("POST", "/v1/load_lora_adapter", {}).status_code != httpx.codes.NOT_FOUND

    def release(self) -> str | None:
        """Return vLLM's version, if the server tells it. Raises EngineUnreachable."""
        response = self._request("GET", "/version")
        try:
            return None if response.is_error else str(response.json()["version"])
        except (ValueError, KeyError, TypeError):
            return None

    def engines(self) -> int:
        """Return how many engines the server has (data parallelism), by its metrics; 1 if it does not tell.

        Raises EngineUnreachable.
        """
        response = self._request("GET", "/metrics")
        running = re.findall(r"^vllm:num_requests_running\{([^}]*)\}", response.text, re.MULTILINE)
        return max(1, len({match[1] for labels in running if (match := re.search(r'engine="(\d+)"', labels))}))

    def fingerprint(self) -> dict[str, Any]:
        """Return the base model's responses to the fixed questions, without the parts that the server does not offer.

        Raises EngineUnreachable, and AdapterRefused if no base model is listed.
        """
        base = next((card["id"] for card in self.cards() if not card.get("parent")), None)
        if base is None:
            raise AdapterRefused(f"{self.url} lists no base model")
        found: dict[str, Any] = {}
        for part, (path, body) in fingerprints.requests(base).items():
            response = self._request("POST", path, body)
            with contextlib.suppress(ValueError):
                found[part] = fingerprints.read(part, response.json())
        return found

    def load(self, name: str, reference: str | Path) -> None:
        """Load a version under a new name: its folder, or by name from object storage. Does nothing if it is loaded.

        Raises EngineUnreachable, also if loading fails with a 500, as for lack of memory; AdapterNotFound if vLLM does
        not find the files yet, AdapterNotServable if a limit of the server excludes it, and AdapterRefused with vLLM's
        message.
        """
        loaded = {card["id"]: card.get("root") for card in self.cards()}
        if name in loaded:
            self._check_identity(name, str(reference), loaded[name])
            return
        if is_remote(str(reference)):
            self._resolve(name, str(reference))
            return
        body = {"lora_name": name, "lora_path": str(reference)}
        response = self._request("POST", "/v1/load_lora_adapter", body, refusals=(500,))
        if response.status_code == httpx.codes.NOT_FOUND and _NO_FILES in response.text:
            raise AdapterNotFound(
                f"{self.url} does not find adapter {name} at {reference}: mount the adapter store there under the same "
                "path, or keep it in object storage (adapters.store)"
            )
        if response.status_code == httpx.codes.NOT_FOUND:
            raise AdapterRefused(
                f"{self.url} cannot load adapters at run time: start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (`ratchet up` does)"
            )
        if response.is_error and _RANK in response.text:
            raise AdapterNotServable(
                f"{self.url} cannot serve {name}: {response.text[:300]}; start it with --max-lora-rank of at least "
                "learner.lora_r"
            )
        if response.is_error and name not in self.models():  # a proxy may have loaded it in the meantime
            if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise EngineUnreachable(
                    f"{self.url} failed to load adapter {name} from {reference}: {response.text[:500]}; vLLM's log has "
                    "the reason, and `ratchet policies rollback` rejects the version if no retry will help"
                )
            raise AdapterRefused(f"{self.url} refused adapter {name} from {reference}: {response.text[:500]}")

    def _check_identity(self, name: str, reference: str, root: object) -> None:
        """Raise AdapterRefused if vLLM says that it has read the name's adapter from another folder."""
        if isinstance(root, str) and root.startswith("/") and not is_remote(reference) and root != reference:
            raise AdapterRefused(
                f"{self.url} serves {name} from {root}, not from {reference}: another project uses this vLLM, or its "
                "state was removed; restart that vLLM"
            )

    def _resolve(self, name: str, reference: str) -> None:
        """Have vLLM load a version by its name, with the plug-in ratchet_lora_resolver."""
        body = {"model": name, "prompt": "a", "max_tokens": 1, "temperature": 0.0}
        response = self._request("POST", "/v1/completions", body)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise AdapterNotFound(
                f"{self.url} does not find {name} in {reference}: vLLM needs the plug-in ratchet_lora_resolver, "
                "RATCHET_ADAPTER_STORE, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and credentials (docs/production.md); "
                "its log has the reason"
            )
        if response.is_error:
            refused = AdapterNotServable if _NOT_LOADED in response.text else AdapterRefused
            raise refused(
                f"{self.url} cannot load {name} from {reference}: {response.text[:300]}; vLLM's log has the reason, "
                "such as a rank above --max-lora-rank: start it with at least learner.lora_r"
            )

    def unload(self, name: str) -> None:
        """Unload an adapter; running calls finish. Does nothing if it is not loaded."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def next_logprobs(self, name: str, prompts: Sequence[Sequence[int]], count: int) -> list[dict[int, float]]:
        """Return the `count` most likely ids after each prompt (ids) under `name`, with logprobs at temperature 1.

        Not by `prompt_logprobs`, with which vLLM computes every place of a prompt and reads none from its prefix cache.
        """
        response = self._score(name, prompts, logprobs=count, return_tokens_as_token_ids=True)
        if response.is_error:
            raise AdapterRefused(f"{self.url} could not score with {name}: {response.text[:500]}")
        choices: list[Any] = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
        return [
            {int(token.removeprefix("token_id:")): float(value) for token, value in likeliest.items()}
            for likeliest in (choice["logprobs"]["top_logprobs"][0] for choice in choices)
        ]

    def prompt_logprobs(self, name: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logprob of each id of the sequences but their first, under `name` at temperature 1.

        Raises EngineUnreachable, also if the key or the name is refused; AdapterRefused if the sequences are, and
        PromptLogprobsMissing if the response has none.
        """
        response = self._score(name, sequences, prompt_logprobs=0)
        if response.is_error:
            refused = _refusal(self.url, f"could not score with {name}", response)
            raise refused if response.status_code in _BAD_REQUEST else EngineUnreachable(str(refused))
        try:
            choices: list[Any] = sorted(response.json()["choices"], key=lambda choice: int(choice["index"]))
            found = [
                _logprobs_of(choice["prompt_logprobs"], ids) for choice, ids in zip(choices, sequences, strict=True)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise PromptLogprobsMissing(
                f"{self.url} returned no prompt_logprobs for the token ids that were sent to {name} ({error!r})"
            ) from error
        return found

    def _score(self, name: str, prompts: Sequence[Sequence[int]], **logprobs: int) -> httpx.Response:
        body = {"model": name, "prompt": [list(ids) for ids in prompts], "max_tokens": 1, "temperature": 1.0}
        return self._request("POST", "/v1/completions", body | {"add_special_tokens": False} | logprobs)

    def tokenize(self, name: str, text: str) -> list[int]:
        """Return the ids of a text, without special tokens at its ends. Raises EngineUnreachable, AdapterRefused."""
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._content("/tokenize", body, "tokens")]

    def detokenize(self, name: str, ids: Sequence[int]) -> str:
        """Return the text of ids. Raises EngineUnreachable, AdapterRefused."""
        return str(self._content("/detokenize", {"model": name, "tokens": list(ids)}, "prompt"))

    def _content(self, path: str, body: dict[str, Any], field: str) -> Any:
        response = self._request("POST", path, body)
        try:
            if not response.is_error:
                return response.json()[field]
        except (ValueError, KeyError, TypeError):
            pass
        raise _refusal(self.url, f"does not offer {path}", response)

    def chat(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        count: int,
    ) -> list[tuple[Mapping[str, Any], int]]:
        """Return `count` sampled responses of `name` to a prompt, as messages, each with the mean length in tokens.

        Raises EngineUnreachable, and AdapterRefused with vLLM's message.
        """
        content = self._completion(name, messages, tools, {**sampling, "n": count})
        tokens = round(int(content["usage"]["completion_tokens"]) / count)
        return [(choice["message"], tokens) for choice in content["choices"]]

    def answer(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        timeout: float,
    ) -> SampledAnswer:
        """Return one sampled response of `name` to a prompt, with its logprobs; `timeout` is in seconds.

        Raises EngineUnreachable, and AdapterRefused with vLLM's message: also for a 500 that vLLM itself explains, as
        for logprobs that are no numbers.
        """
        sampling = {**sampling, "logprobs": True}
        content = self._completion(name, messages, tools, sampling, refusals=(500,), timeout=timeout)
        choice = content["choices"][0]
        entries = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in entries if entry.get("logprob") is not None]
        usage = content.get("usage") or {}
        tokens = int(usage.get("completion_tokens") or len(logprobs))
        return SampledAnswer(choice["message"], choice.get("finish_reason"), tokens, tuple(logprobs))

    def _completion(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        **request: Any,
    ) -> Any:
        """Return the body of a chat completion of `name`; `request` goes to `_request`."""
        body = {"model": name, "messages": list(messages), **sampling}
        if tools:
            body["tools"] = list(tools)
        response = self._request("POST", "/v1/chat/completions", body, **request)
        if response.is_error:
            raise AdapterRefused(f"{self.url} could not answer with {name}: {response.text[:500]}")
        return response.json()

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        refusals: tuple[int, ...] = (),
        timeout: float | None = None,
    ) -> httpx.Response:
        """Return the response. A status in `refusals` with vLLM's error is a response; other ones from 500 raise."""
        try:
            limit = httpx.USE_CLIENT_DEFAULT if timeout is None else httpx.Timeout(timeout)
            response = self._http.request(method, path, json=body, timeout=limit)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"vLLM at {self.url} does not answer ({error or type(error).__name__})") from error
        refused = response.status_code in refusals and '"error"' in response.text and "EngineDead" not in response.text
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR and not refused:
            raise EngineUnreachable(f"vLLM at {self.url} answered {response.status_code}: {response.text[:300]}")
        return response


def _logprobs_of(entries: Any, ids: Sequence[int]) -> list[float]:
    """Return the logprobs of ids but the first. Raises ValueError, KeyError, TypeError if one is missing."""
    if len(entries) != len(ids):
        raise ValueError(f"{len(entries)} entries for {len(ids)} ids")
    return [float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], ids[1:], strict=True)]


def _refusal(url: str, problem: str, response: httpx.Response) -> AdapterRefused:
    return AdapterRefused(f"{url} {problem} ({response.status_code}): {response.text[:300]}")


# The vLLM replicas that the controller knows now, and questions to all of them at once.
#
# Promises that a replica that does not answer delays nobody: each is called in a thread of its own, and once enough
# have answered the others get a short time to do the same. A late replica counts as missing.

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 5.0
_GRACE_SECONDS = 2.0

_T = TypeVar("_T")


def quorum_of(replicas: int, quorum: int | None) -> int:
    """Return how many of the replicas must serve a version: all of one or two, else all but one, or `quorum`."""
    default = replicas if replicas <= 2 else replicas - 1
    return max(1, default if quorum is None else min(quorum, replicas))


class ReplicaFleet(Sequence[VllmServer]):
    """The replicas of a list that may change; `refresh` reads it again."""

    def __init__(self, entries: Sequence[str], key: str | None = None, timeout: float = 60.0) -> None:
        self._list = ReplicaList(entries)
        self._key = key
        self._timeout = timeout
        self._made: dict[str, VllmServer] = {}
        self._current: tuple[VllmServer, ...] = ()
        self._refreshed_at = 0.0
        self._problem: str | None = None
        self.refresh(0.0)

    @overload
    def __getitem__(self, index: int) -> VllmServer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[VllmServer]: ...
    def __getitem__(self, index: int | slice) -> VllmServer | Sequence[VllmServer]:
        return self._current[index]

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[VllmServer]:
        return iter(self._current)

    def refresh(self, now: float) -> None:
        """Read the list again, at most every few seconds. Replicas that stay keep their connections."""
        if self._current and (self._list.is_fixed or now - self._refreshed_at < _REFRESH_SECONDS):
            return
        self._refreshed_at = now
        before = {replica.url for replica in self._current}
        found = self._list.resolve()
        if self._list.problem not in (None, self._problem):
            log.warning("event=replicas_not_read reason=%r", self._list.problem)
        self._problem = self._list.problem
        for url in found:
            if url not in self._made:
                self._made[url] = VllmServer(url, self._timeout, self._key)
        self._current = tuple(self._made[url] for url in found)
        after = {replica.url for replica in self._current}
        if before and before != after:
            log.info("event=replicas_changed came=%s went=%s", sorted(after - before), sorted(before - after))

    def close(self) -> None:
        for replica in self._made.values():
            replica.close()


def ask_all(
    replicas: Sequence[VllmServer], ask: Callable[[VllmServer], _T], enough: int
) -> tuple[dict[str, _T], dict[str, EngineError]]:
    """Return the answers and the errors, by URL. Raises what is not an EngineError.

    When `enough` replicas have answered, the others get as long again, and at least two seconds.
    """
    results: queue.SimpleQueue[tuple[str, _T | Exception]] = queue.SimpleQueue()

    def run(replica: VllmServer) -> None:
        try:
            results.put((replica.url, ask(replica)))
        except Exception as error:  # noqa: BLE001 -- raised below, in the caller's thread
            results.put((replica.url, error))

    started = time.monotonic()
    for replica in replicas:
        threading.Thread(target=run, args=(replica,), name=f"ask {replica.url}", daemon=True).start()
    answers: dict[str, _T] = {}
    errors: dict[str, EngineError] = {}
    deadline: float | None = None
    while len(answers) + len(errors) < len(replicas):
        try:
            url, result = results.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(result, EngineError):
            errors[url] = result
        elif isinstance(result, Exception):
            raise result
        else:
            answers[url] = result
        if deadline is None and len(answers) >= enough:
            now = time.monotonic()
            deadline = now + max(_GRACE_SECONDS, now - started)
    for replica in replicas:
        if replica.url not in answers and replica.url not in errors:
            seconds = time.monotonic() - started
            errors[replica.url] = EngineUnreachable(f"vLLM at {replica.url} has not answered within {seconds:.0f} s")
    return answers, errors


def replicas_that_serve(replicas: Sequence[VllmServer], names: Set[str]) -> list[VllmServer]:
    """Return the replicas that answer and serve all these names. Raises EngineUnreachable or AdapterRefused if
    there is none.
    """
    known = tuple(replicas)
    models, errors = ask_all(known, VllmServer.models, 1)
    serving = [one for one in known if names <= set(models.get(one.url, ()))]
    if not serving and errors:
        raise next(iter(errors.values()))
    if not serving:
        raise AdapterRefused(f"of {len(known)} replicas none serves {' and '.join(sorted(names))}")
    return serving
