"""Reads files of a model: of a folder, in the hub's cache, or on the hub. Loads no weights and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ratchet.trainer.errors import ModelShapeUnknown

_FILE = "config.json"
_TIMEOUT = 10.0  # seconds


def read_config(model: str) -> dict[str, Any]:
    """Return the content of a model's config.json. Raises ModelShapeUnknown, with the remedy, if there is none.

    For hub names HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and HF_HOME apply.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        file = folder / _FILE
        if not file.is_file():
            raise ModelShapeUnknown(f"{folder} has no {_FILE}: name the folder that holds it, or a hub name")
        return _parsed(_text(file), str(file))
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelShapeUnknown(f"{model}: no such folder; name one that holds {_FILE}, or a hub name (owner/model)")
    cached = _from_cache(model, _FILE)
    if cached is not None:
        return _parsed(_text(cached), str(cached))
    text, problem = _from_hub(model, _FILE)
    if text is None:
        raise ModelShapeUnknown(
            f"{model}: no such folder; as a hub name it is {problem}; or name a folder with {_FILE}"
        )
    return _parsed(text, f"{model}/{_FILE}")


def read_model_file(model: str, name: str, *, ask_hub: bool = True) -> str | None:
    """Return the text of a file of a model, a folder or a hub name; None if it has none, or it cannot be read.

    `ask_hub`: ask the hub, once, for a file that its local cache does not know.
    """
    folder = Path(model).expanduser()
    try:
        if folder.is_dir():
            file: Path | str | None = folder / name
        else:
            file = _from_cache(model, name)
        if file is None:
            return _from_hub(model, name)[0] if ask_hub else None
        return _text(Path(file))
    except ModelShapeUnknown:
        return None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelShapeUnknown(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelShapeUnknown(f"{name} is not the configuration of a model: it holds no JSON object")
    return content


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelShapeUnknown(f"{file} cannot be read: {error}") from error


def _from_cache(model: str, name: str) -> Path | None:
    """Return a file in the hub's cache; None if it is not known. Raises ModelShapeUnknown."""
    try:
        from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ModelShapeUnknown(
            f"{model}: no such folder, and hub names need huggingface_hub: name a folder that holds {_FILE}"
        ) from error
    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError as error:
        raise ModelShapeUnknown(f"{model}: neither a folder nor a hub name (owner/model)") from error
    if cached is _CACHED_NO_EXIST:
        raise ModelShapeUnknown(f"{model} has no {name} on the hub")
    return Path(cached) if isinstance(cached, str) else None


def _from_hub(model: str, name: str) -> tuple[str | None, str]:
    """Ask the hub once for a file; return its text, or None and what is wrong with the model's name.

    huggingface_hub's own download would try for half a minute.
    """
    import httpx
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return None, "not in the local hub cache, and HF_HUB_OFFLINE is set"
    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"{constants.ENDPOINT}/{model}/resolve/main/{name}"
    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = f"not in the local hub cache, and {constants.ENDPOINT} cannot be reached ({type(error).__name__})"
        return None, problem
    if answer.status_code == httpx.codes.OK:
        return answer.text, ""
    return None, f"without a {name} on {constants.ENDPOINT} ({answer.status_code}): check the name and HF_TOKEN"
