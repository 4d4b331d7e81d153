"""Is a hub name the name of a model? Asked before anything is started, so that a misspelt name is told at once.

The local cache is enough; else the hub is asked for config.json, which is then cached. huggingface_hub's own variables
apply: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, HF_HOME. Without that package nothing can be asked, and vLLM will tell.
"""

from __future__ import annotations

from ratchet.errors import ModelMissing

_TIMEOUT = 10.0  # seconds
_FILE = "config.json"


def check(name: str) -> None:
    """Raise ModelMissing, with the remedy, where neither the local cache nor the hub has the model."""
    try:
        from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache
    except ImportError:
        return
    try:
        if not isinstance(try_to_load_from_cache(name, _FILE), str):
            hf_hub_download(name, _FILE, etag_timeout=_TIMEOUT)
        return
    except errors.HFValidationError as error:
        said = f"is no folder and no hub name: {' '.join(str(error).split())}"
    except errors.GatedRepoError:
        said = f"is gated: accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        said = f"is no folder here and no model on {constants.ENDPOINT}: mend the name, or set HF_TOKEN if it is private"
    except errors.LocalEntryNotFoundError:
        how = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} could not be asked"
        said = f"is no folder here and not in the local hub cache, and {how}: download the model, or name a folder"
    except errors.EntryNotFoundError:
        said = f"has no {_FILE} on {constants.ENDPOINT}: name a model that vLLM can load"
    except OSError as error:
        said = f"could not be looked up on {constants.ENDPOINT} ({type(error).__name__}): try again, or name a folder"
    raise ModelMissing(f"base model {name}: taken as a hub name, it {said}")
