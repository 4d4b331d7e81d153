"""vLLM's control API: load, unload, list and score adapters of one replica over HTTP. The only client of it.

HTTP errors become EngineError here. A name is never loaded twice, because vLLM keys its prefix cache by name.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ratchet.store.access.replicas import credentials, without_credentials
from ratchet.store.policies import fingerprints
from ratchet.trainer.adapters.adapter_store import is_remote
from ratchet.trainer.errors import (
    AdapterNotFound,
    AdapterNotServable,
    AdapterRefused,
    EngineUnreachable,
    PromptLogprobsMissing,
)

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
        """Close the connections."""
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
                "learner.lora_r (vllm.max_lora_rank)"
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
        body = {
            "model": name,
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": count,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        response = self._request("POST", "/v1/completions", body)
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
        body = {
            "model": name,
            "prompt": [list(ids) for ids in sequences],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "add_special_tokens": False,
        }
        response = self._request("POST", "/v1/completions", body)
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
