"""Checks before anything starts: the hub model's name, the adapter store, the judges, and the base model of versions.

vLLM and the trainer would fail on the same problems, but minutes later and with longer messages. If a check cannot run
(no huggingface_hub), it passes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from ratchet.errors import CliError, SettingsError
from ratchet.settings.project_settings import Settings
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.records import BaseModel
from ratchet.store.store import Store
from ratchet.supervisor import vllm_command
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.adapters.base_model_files import bytes_to_read, digests, model_folder
from ratchet.trainer.errors import CheckpointError

_HUB_TIMEOUT = 10.0  # seconds
_JUDGE_TIMEOUT = 120.0  # seconds; a judge may import large packages
_HUB_FILE = "config.json"
_MAKE_JUDGE = """
import json, os, sys
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
try:
    make_judge(read_spec(json.load(sys.stdin)), os.environ).close()
except TrainerError as error:
    sys.exit("ratchet: " + str(error))
"""
_DIGEST_CHARS = 12  # characters of a digest
_LARGE = 2_000_000_000  # bytes; reading more is announced


def check_adapter_store(settings: Settings) -> None:
    """Raise SettingsError if no version can be written to the adapter store that the settings name."""
    store = settings.adapters.store
    if store is None or not settings.has_judge:
        return
    try:
        AdapterStore(settings.state.adapter_cache).check(store)
    except CheckpointError as error:
        raise SettingsError(str(error)) from error


def check_hub_model(name: str) -> None:
    """Raise CliError, with the remedy, if neither the local hub cache nor the hub has a model of this name.

    The hub is asked once for config.json. HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and HF_HOME apply.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return
    try:
        if isinstance(try_to_load_from_cache(name, _HUB_FILE), str):
            return
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise CliError(f"base model {name}: neither a folder nor a hub name: {reason}") from error
    if constants.HF_HUB_OFFLINE:
        problem = "not in the local hub cache, and HF_HUB_OFFLINE is set: download it, or name a folder"
    else:
        problem = _ask_hub(name, constants.ENDPOINT)
    if problem:
        raise CliError(f"base model {name}: no such folder; as a hub name it is {problem}")


def _ask_hub(name: str, hub: str) -> str:
    """Return what is wrong with a name on the hub; empty if nothing is."""
    from huggingface_hub import get_token

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        # A redirect leads to the file, so the file exists.
        answer = httpx.head(f"{hub}/{name}/resolve/main/{_HUB_FILE}", headers=headers, timeout=_HUB_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"not in the local hub cache, and {hub} cannot be reached ({type(error).__name__}): name a folder"
    if answer.status_code < 400:
        return ""
    code = answer.headers.get("x-error-code", "")
    if code == "GatedRepo":
        return f"gated: accept its terms at {hub}/{name} and set HF_TOKEN"
    if code == "EntryNotFound":
        return f"a repository on {hub} without {_HUB_FILE}: name a model that vLLM can load"
    if answer.status_code in (401, 403, 404):
        return f"no model on {hub}: correct the name, or set HF_TOKEN if it is private"
    return f"not confirmed: {hub} answered {answer.status_code}; try again later, or name a folder"


def check_judges(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raise SettingsError if the trainer could not create the judge of an agent.

    Runs in a process of its own: the user's code is never imported into the supervisor.
    """
    checked: dict[str, str] = {}  # the first agent with a judge, by its specification
    for name, agent in settings.agents_by_name.items():
        if agent.has_judge:
            key = f"agents.{name}.judge" if settings.agents else "trainer.judge"
            checked.setdefault(agent.judge.model_dump_json(), key)
    for spec, key in checked.items():
        _check_judge(spec, key, environ)


def _check_judge(spec: str, key: str, environ: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _MAKE_JUDGE], input=spec, capture_output=True, text=True,
            timeout=_JUDGE_TIMEOUT, env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SettingsError(
            f"{key}: creating it took longer than {_JUDGE_TIMEOUT:g} s: what does it import?"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SettingsError(f"{key}: {last.removeprefix('ratchet: ')}")


# The versions of a project's agents belong to the base model that will be served. Another one is rejected with a
# message that names both and the remedies. A project without a recorded base model records the one that it is started
# with, with a note. Files in the hub cache are read there; a model that is not yet downloaded is checked once vLLM has
# it.


def check_base_model(settings: Settings, store: Store, note: Callable[[str], None], *, serves: bool = False) -> bool:
    """Compare the base model with each agent's in the store; return whether its files could be read.

    `serves`: vLLM serves it already. Raises CliError.
    """
    model = vllm_command.check_model(settings.base_model)
    folder = model_folder(model)
    if folder is None:
        return False
    agents = [settings.for_agent(name) for name in settings.agents_by_name]
    files = _digests_of_all(agents, model, folder, note)
    for agent in agents:
        _check_agent(agent, store, model, files, note, serves=serves)
    return True


def _digests_of_all(
    agents: Sequence[Settings], model: str, folder: Path, note: Callable[[str], None]
) -> dict[str, str]:
    """Return the digests of the base model, which all agents share; each agent's trainer finds them cached."""
    caches = [agent.state.base_digests(agent.model) for agent in agents]
    cache = next((file for file in caches if file.is_file()), caches[0])
    if (size := bytes_to_read(folder, cache)) >= _LARGE:
        note(f"base model {model}: reading its {size / 1e9:.1f} GB of weights once, to compute their digests")
    files = digests(folder, cache)
    for other in caches:
        if other != cache and cache.is_file():
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cache, other)
    return files


def _check_agent(
    settings: Settings, store: Store, model: str, files: dict[str, str], note: Callable[[str], None], *, serves: bool
) -> None:
    """Compare the base model's digests with those of one agent's. Raises CliError."""
    known = store.base_models.base_model_of(settings.model)
    if known is not None and (parts := known.differing_parts(files)):
        if not store.base_models.clear_base_model(settings.model):
            raise CliError(mismatch_message(settings, store, known, model, files, parts))
        note(f"base model of {settings.model}: {model} replaces {known.name}, which nothing has run on yet")
        known = None
    unrecorded = known is None and (
        any(policy.version for policy in store.policies.all(settings.model))
        or bool(store.trajectories.page(1, chosen=TrajectoryFilter(alias=settings.model)))
    )
    store.base_models.register_base_model(settings.model, model, file_digests=files)
    if not serves:  # vLLM's options change its answers for the same files: the proxy records them again
        store.base_models.clear_base_model(settings.model, served_only=True)
    if unrecorded:
        weights = files["weights"][:_DIGEST_CHARS]
        note(f"base model: none was recorded for {settings.model}; it is now {model} (weights {weights})")


def mismatch_message(
    settings: Settings, store: Store, known: BaseModel, model: str, files: dict[str, str], parts: list[str]
) -> str:
    """Return the error message for a base model that the versions do not belong to."""
    alias, live = settings.model, store.policies.live().get(settings.model)
    newest = max((policy.version for policy in store.policies.all(alias)), default=0)
    versions = f"{alias}@0" if newest == 0 else f"{alias}@0 to {alias}@{newest}"
    serves = f", {alias}@{live.version} live," if live and newest else ""
    changed = ", ".join(
        f"{part} {known.file_digests[part][:_DIGEST_CHARS]}, now {files[part][:_DIGEST_CHARS]}" for part in parts
    )
    if settings.store is None:
        remedy = (
            "use another project for the new one (--project NAME), or start this one over: `ratchet down` and move "
            f"{settings.state.root} away"
        )
    else:
        remedy = "use another alias for the new one (--model NAME) or another --store"
    return (
        f"base_model: {versions}{serves} of project {settings.project} belong to {known.name}, and {model} is another "
        f"model ({changed}): adapters do not fit another base model, and scores cannot be compared. Go back to "
        f"{known.name}, {remedy}"
    )
