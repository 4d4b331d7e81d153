"""A plug-in for vLLM: asked for the adapter `agent@version`, it loads it from the adapter store; asked for
`agent@version` followed by `x` and a factor, the amplified copy that the proof of a swap measures.

    RATCHET_ADAPTER_STORE        URL of the store, as `adapters.store`: s3://bucket/prefix
    RATCHET_ADAPTER_CACHE        folder of the downloaded adapters; default: ~/.cache/ratchet/adapters
    RATCHET_ADAPTER_CACHE_BYTES  bound of that folder; default: 20 GB. vLLM reads an adapter again after an eviction
    RATCHET_ADAPTER_BASE_MODEL   the base model that the adapters name, if this vLLM knows it by another name

vLLM calls `resolve_lora` for a model name that it does not know. An adapter that is damaged or belongs to another base
model is refused with a line in vLLM's log, and the request is answered with 404. Credentials come from the usual
variables, such as AWS_ACCESS_KEY_ID. Without RATCHET_ADAPTER_STORE the plug-in does nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import ratchet_adapter_files as adapter_files

_NAME = re.compile(r"(?P<agent>[^@/\s]+)@(?P<version>\d{1,9})(?P<factor>x[0-9.e+-]+)?")
_CACHE_BYTES = 20_000_000_000


def register() -> None:
    """Register the resolver. vLLM calls this in each of its processes."""
    store = os.environ.get("RATCHET_ADAPTER_STORE", "")
    if not store:
        return
    from vllm.lora.resolver import LoRAResolverRegistry

    LoRAResolverRegistry.register_resolver("ratchet", make_resolver(store))


def make_resolver(store: str) -> Any:
    """Return a LoRAResolver of an adapter store."""
    from vllm.logger import init_logger
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver

    log = init_logger("vllm.ratchet_lora_resolver")
    cache = Path(os.environ.get("RATCHET_ADAPTER_CACHE") or Path.home() / ".cache" / "ratchet" / "adapters")
    max_bytes = int(os.environ.get("RATCHET_ADAPTER_CACHE_BYTES") or _CACHE_BYTES)
    own_name = os.environ.get("RATCHET_ADAPTER_BASE_MODEL")

    class AdapterStoreResolver(LoRAResolver):
        """Loads adapters from the adapter store."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            named = _NAME.fullmatch(lora_name)
            if named is None:
                return None
            url = url_of(store, named["agent"], int(named["version"])) + (named["factor"] or "")
            try:
                folder = await asyncio.to_thread(
                    adapter_files.fetch, url, cache, state=False, max_cache_bytes=max_bytes
                )
            except adapter_files.DamagedAdapter as damaged:
                log.error("Adapter %s is refused: %s", lora_name, damaged)
                return None
            except FileNotFoundError:
                log.warning("Adapter %s is not at %s", lora_name, url)
                return None
            except Exception as error:  # noqa: BLE001 -- the libraries of the stores share no base class
                log.error("Adapter %s cannot be read from %s: %r", lora_name, url, error)
                return None
            if (reason := other_base_model(folder, own_name or base_model_name)) is not None:
                log.error("Adapter %s is refused: %s", lora_name, reason)
                return None
            return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(folder))  # vLLM sets the id

    return AdapterStoreResolver()


def url_of(store: str, agent: str, version: int) -> str:
    return f"{store.rstrip('/')}/{agent}/checkpoints/{version:04d}"


def other_base_model(folder: Path, base_model: str) -> str | None:
    """Return why an adapter does not fit the base model; None if it does. Folders are compared by their last part."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        name, kind = str(config["base_model_name_or_path"]), config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"adapter_config.json cannot be read ({error!r})"
    if kind != "LORA":
        return f"it is no LoRA adapter but {kind}"
    if _last_part(name) != _last_part(base_model):
        return (
            f"it was trained on {name}, and this vLLM serves {base_model}; if they are the same model, set "
            f"RATCHET_ADAPTER_BASE_MODEL={name}"
        )
    return None


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
