"""The engine's control plane: one vLLM replica, asked over HTTP to load, unload, list and score adapters.

The one module of the trainer that meets an HTTP client; foreign errors become EngineError here. A name is never loaded
twice: vLLM keys its prefix cache by name.
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


class Replica:
    """One vLLM server. `key` is its API key, where it has one. Times out in `timeout` seconds.

    `url` is without /v1; a user's name and password in it go to the server and stand nowhere else.
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
        """Return the names that the replica answers to, adapters included."""
        answer = self._ask("GET", "/v1/models")
        if answer.is_error:
            raise AdapterRefused(f"{self.url} does not list its models ({answer.status_code}): {answer.text[:300]}")
        return tuple(str(model["id"]) for model in answer.json()["data"])

    def fingerprint(self) -> dict[str, Any]:
        """Return how the base model answers the fixed questions; a part that is not offered is left out.

        Raises EngineUnreachable, and AdapterRefused where no base model is listed.
        """
        answer = self._ask("GET", "/v1/models")
        cards: list[Any] = [] if answer.is_error else answer.json().get("data", [])
        base = next((str(card["id"]) for card in cards if not card.get("parent")), None)
        if base is None:
            raise AdapterRefused(f"{self.url} lists no base model")
        found: dict[str, Any] = {}
        for part, (path, body) in fingerprints.requests(base).items():
            answer = self._ask("POST", path, body)
            with contextlib.suppress(ValueError):
                found[part] = fingerprints.read(part, answer.json())
        return found

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter folder under a new name; a name that is already loaded is left as it is.

        Raises AdapterRefused with vLLM's own words.
        """
        if name in self.models():
            return
        answer = self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise AdapterRefused(
                f"{self.url} cannot load adapters at run time: start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (`ratchet up` does)"
            )
        if answer.is_error and name not in self.models():  # a proxy that needed it may have loaded it meanwhile
            raise AdapterRefused(f"{self.url} refused adapter {name} from {folder}: {answer.text[:500]}")

    def unload(self, name: str) -> None:
        """Unload an adapter; running calls finish. One that is not loaded is no error."""
        self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def next_logprobs(self, name: str, prompts: Sequence[Sequence[int]], most: int) -> list[dict[int, float]]:
        """Return the `most` likeliest ids after each prompt (ids) under `name`, with their logprobs at temperature 1.

        Sampled logprobs are asked for, not `prompt_logprobs`: with an adapter and other calls in the same batch those
        end vLLM 0.32's engine on CPU.
        """
        body = {
            "model": name,
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": 1,
            "temperature": 1.0,
            "logprobs": most,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        answer = self._ask("POST", "/v1/completions", body)
        if answer.is_error:
            raise AdapterRefused(f"{self.url} could not score with {name}: {answer.text[:500]}")
        choices: list[Any] = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
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
        """Return `count` sampled answers of `name` to a prompt, as messages, each with its length in tokens (a mean).

        Raises AdapterRefused with vLLM's own words.
        """
        body = {"model": name, "messages": list(messages), **sampling, "n": count}
        if tools:
            body["tools"] = list(tools)
        answer = self._ask("POST", "/v1/chat/completions", body)
        if answer.is_error:
            raise AdapterRefused(f"{self.url} could not answer with {name}: {answer.text[:500]}")
        content = answer.json()
        tokens = round(int(content["usage"]["completion_tokens"]) / count)
        return [(choice["message"], tokens) for choice in content["choices"]]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineUnreachable(f"vLLM at {self.url} does not answer ({error or type(error).__name__})") from error
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise EngineUnreachable(f"vLLM at {self.url} answered {answer.status_code}: {answer.text[:300]}")
        return answer
