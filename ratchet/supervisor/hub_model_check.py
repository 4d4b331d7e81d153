"""Is a hub name the name of a model? Asked before anything is started, so that a misspelt name is told at once.

The local cache is enough; else the hub is asked once for config.json. huggingface_hub's own variables apply:
HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, HF_HOME. Without that package nothing can be asked, and vLLM will tell.
"""

from __future__ import annotations

from ratchet.errors import BaseModelNotFound

_TIMEOUT = 10.0  # seconds
_FILE = "config.json"


def check(name: str) -> None:
    """Raise BaseModelNotFound, with the remedy, where neither the local cache nor the hub has the model."""
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return
    try:
        if isinstance(try_to_load_from_cache(name, _FILE), str):
            return
    except HFValidationError as error:
        raise BaseModelNotFound(
            f"base model {name}: no folder and no hub name: {' '.join(str(error).split())}"
        ) from error
    if constants.HF_HUB_OFFLINE:
        said = "not in the local hub cache, and HF_HUB_OFFLINE is set: download it, or name a folder"
    else:
        said = _ask(name, constants.ENDPOINT)
    if said:
        raise BaseModelNotFound(f"base model {name}: no folder of that name here; taken as a hub name it is {said}")


def _ask(name: str, hub: str) -> str:
    """Ask the hub; return what is wrong with the name, empty where nothing is."""
    import httpx
    from huggingface_hub import get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    url = f"{hub}/{name}/resolve/main/{_FILE}"
    try:
        # A redirect leads to where the file lies, so it is there.
        answer = httpx.head(url, headers=headers, timeout=_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"not in the local hub cache, and {hub} could not be asked ({type(error).__name__}): name a folder"
    if answer.status_code < 400:
        return ""
    code = answer.headers.get("x-error-code", "")
    if code == "GatedRepo":
        return f"gated: accept its terms at {hub}/{name} and set HF_TOKEN"
    if code == "EntryNotFound":
        return f"a repository on {hub} without {_FILE}: name a model that vLLM can load"
    if answer.status_code in (401, 403, 404):
        return f"no model on {hub}: mend the name, or set HF_TOKEN if it is private"
    return f"not known: {hub} answered {answer.status_code}; try again later, or name a folder"
