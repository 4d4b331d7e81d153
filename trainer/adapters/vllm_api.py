"""vLLM's control API: load, unload, list and score adapters of one replica over HTTP. The only client of it.

HTTP errors become EngineError here. A name is never loaded twice, because vLLM keys its prefix cache by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ratchet.store.access.url_credentials import credentials, without_credentials
from ratchet.store.policies import fingerprints
from ratchet.trainer.errors import AdapterRefused, EngineUnreachable


def list_models(url: str, key: str | None = None, timeout: float = 30.0) -> list[dict[str, Any]]:
    """Return the entries of /v1/models of a vLLM server or a proxy. Raises EngineUnreachable, AdapterRefused."""
    try:
        replica = VllmServer(url, timeout, key)
    except httpx.InvalidURL as error:
        raise EngineUnreachable(f"the URL is invalid ({error})") from error
    with contextlib.closing(replica):
        return replica.cards()


class VllmServer:
    """One vLLM server. `key` is its API key, if it has one; `timeout` is in seconds.

    `url` is without /v1. User name and password in it are sent to the server and appear nowhere else.
    """

    def __init__(self, url: str, timeout: float = 60.0, key: str | None = None) -> None:
        self.url = without_credentials(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            base_url=self.url, auth=credentials(url), timeout=timeout, headers=headers, trust_env=False
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

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter folder under a new name. Does nothing if the name is loaded already.

        Raises EngineUnreachable, and AdapterRefused with vLLM's message.
        """
        if name in self.models():
            return
        response = self._request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if response.status_code == httpx.codes.NOT_FOUND:
            raise AdapterRefused(
                f"{self.url} cannot load adapters at run time: start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (`ratchet up` does)"
            )
        if response.is_error and name not in self.models():  # a proxy may have loaded it in the meantime
            raise AdapterRefused(f"{self.url} refused adapter {name} from {folder}: {response.text[:500]}")

    def unload(self, name: str) -> None:
        """Unload an adapter; running calls finish. Does nothing if it is not loaded."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def next_logprobs(self, name: str, prompts: Sequence[Sequence[int]], count: int) -> list[dict[int, float]]:
        """Return the `count` most likely ids after each prompt (ids) under `name`, with logprobs at temperature 1.

        Uses sampled logprobs, not `prompt_logprobs`: with an adapter and other calls in the same batch the latter
        crash vLLM 0.32 on CPU.
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
        body = {"model": name, "messages": list(messages), **sampling, "n": count}
        if tools:
            body["tools"] = list(tools)
        response = self._request("POST", "/v1/chat/completions", body)
        if response.is_error:
            raise AdapterRefused(f"{self.url} could not answer with {name}: {response.text[:500]}")
        content = response.json()
        tokens = round(int(content["usage"]["completion_tokens"]) / count)
        return [(choice["message"], tokens) for choice in content["choices"]]

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"vLLM at {self.url} does not answer ({error or type(error).__name__})") from error
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise EngineUnreachable(f"vLLM at {self.url} answered {response.status_code}: {response.text[:300]}")
        return response
