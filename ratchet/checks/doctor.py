"""`ratchet doctor`: checks that training can work, each against the running services.

    memory     with a GPU: vLLM and learner fit, by formula (`memory_check.py`)
    vllm       it is installed, answers, loads adapters at run time and serves several safely
    adapters   the place of `adapters.store` can be written and read, if it is set
    capture    a call through the proxy is in the store with the engine's token ids and logprobs
    gradient   one round of the learner on tiny rows changes the adapter's weights (`learner_check.py`)
    swap       vLLM with that adapter returns the learner's logprobs, not the base model's
    batches    on a CPU: base model requests are correct in a batch with adapter requests
    judge      it returns scores, distinguishes answers and does not crash (`judge_quality_check.py`)
    teacher    instead of `judge`, with a teacher: it scores token ids and has the policy's tokens (`teacher_check.py`)

With --proxy, the call goes through that proxy. If no project is up, its services were started separately: `vllm`,
`swap`, `batches`, `teacher` and `resampling` are then skipped.

If resampling is on, `resampling_check.py` runs too. Of several agents, each gets the checks capture, judge and
resampling; the others concern what all agents share.

Its trajectory is dropped at once and never trained; its adapter is unloaded. A failed check names the remedy, and
checks that depend on it report that. Only a learner's check without a running learner imports torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ratchet.checks.adapter_store_check import check_adapter_store
from ratchet.checks.check_result import NO_PROJECT, PATIENCE, CheckResult, no_project, see_log
from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.supervisor import vllm_command
from ratchet.supervisor.up import read_run_state

if TYPE_CHECKING:
    from ratchet.checks.judge_quality_check import JudgeExample
    from ratchet.store.store import Store

_WAIT_FOR_RECORD = 10.0  # seconds

_WITH_A_KEY = (
    "run `RATCHET_API_KEYS=KEY ratchet doctor` with an agent's key (`ratchet keys create --name doctor` makes one)"
)


def run_checks(
    settings: Settings,
    proxy: str | None = None,
    example: JudgeExample | None = None,
    announce: Callable[[str], None] = lambda check: None,
) -> Iterator[CheckResult]:
    """Yield the results in order: of what all agents share once, of capture, judge and resampling for each agent.

    `proxy`: its URL without /v1, in place of the project's; `example`: what a judge scores if no call is recorded;
    `announce` gets the name of each check that may take long, before it runs.
    """
    running = read_run_state(settings.state)
    if not running.get("ready") or not running.get("vllm_url"):
        running = {}
    if proxy is not None:
        running = {**running, "base_url": f"{proxy}/v1"}
    agents = list(settings.agents_by_name.values())
    from ratchet.checks.learner_check import check_learner
    from ratchet.checks.memory_check import check_memory

    if (memory := check_memory(settings)) is not None:
        yield memory
    yield _vllm(settings, running)
    if settings.adapters.store is not None:
        yield check_adapter_store(settings)
    captured: tuple[int, ...] = ()
    announce("capture")
    for agent in agents:
        ids, finding = _capture(agent, running)
        captured = captured or ids
        yield _of(agent, agents, finding)
    yield from check_learner(agents[0], running, captured, announce)
    from ratchet.checks.judge_quality_check import check_judge_quality
    from ratchet.checks.resampling_check import check_resampling, is_resampling_enabled
    from ratchet.checks.teacher_check import check_teacher, has_teacher

    announce("judge")
    for agent in agents:
        taught = has_teacher(agent)
        yield _of(agent, agents, check_teacher(agent, running) if taught else check_judge_quality(agent, example))
        if is_resampling_enabled(agent):
            yield _of(agent, agents, check_resampling(agent, running))


def _of(agent: Settings, agents: list[Settings], finding: CheckResult) -> CheckResult:
    """Return the result with the agent's name, if there are several."""
    return replace(finding, seen=f"{agent.model}: {finding.seen}") if len(agents) > 1 else finding


def _vllm(settings: Settings, running: dict[str, Any]) -> CheckResult:
    from ratchet.checks.vllm_server_check import describe_problem
    from ratchet.trainer.adapters.vllm_api import VllmServer
    from ratchet.trainer.errors import TrainerError

    if running and "vllm_url" not in running:
        return no_project("vllm", running)
    try:
        vllm_command.check_installed(settings)
    except CliError as error:
        return CheckResult("vllm", False, "vLLM cannot be started", str(error))
    if not running:
        return CheckResult("vllm", False, f"installed; project {settings.project} is not up", NO_PROJECT)
    url = running["vllm_url"]
    try:
        with contextlib.closing(VllmServer(url, timeout=30)) as replica:
            names = replica.models()
            can_load_adapters = replica.can_load_adapters()
            problem = describe_problem(replica)
    except TrainerError as error:
        return CheckResult("vllm", False, f"{url} does not answer like vLLM: {error}", see_log(settings, "vllm"))
    if not can_load_adapters:
        return CheckResult(
            "vllm",
            False,
            f"{url} cannot load adapters at run time",
            "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as `ratchet up` does",
        )
    if problem is not None:
        return CheckResult("vllm", False, *problem)
    return CheckResult("vllm", True, f"{url} serves {', '.join(names)} and loads adapters at run time")


def _capture(settings: Settings, running: dict[str, Any]) -> tuple[tuple[int, ...], CheckResult]:
    """Return the prompt and answer ids of a recorded call, and the result."""
    import ssl

    import httpx

    from ratchet.store.errors import StoreError
    from ratchet.store.store import open_store

    if not running:
        return (), no_project("capture", running)
    body = {
        "model": settings.model,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": f"doctor {time.time_ns()}: say something"}],
    }
    log = see_log(settings, "proxy") if "vllm_url" in running else "look at the proxy's log"
    try:
        answer = httpx.post(
            f"{running['base_url']}/chat/completions",
            json=body,
            headers=_key(),
            timeout=PATIENCE,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
    except httpx.HTTPError as error:
        return (), CheckResult("capture", False, f"{running['base_url']} does not answer: {error}", log)
    if answer.status_code not in (httpx.codes.OK, httpx.codes.UNAUTHORIZED):
        return (), CheckResult("capture", False, f"the call failed: {answer.status_code} {answer.text[:300]}", log)
    try:
        with contextlib.closing(open_store(settings.store_url, create=False)) as store:
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                return (), CheckResult("capture", False, missing_key_kinds(store), _WITH_A_KEY)
            return _read_back(store, answer.headers.get("x-ratchet-call", ""), log)
    except StoreError as error:
        return (), CheckResult("capture", False, f"the proxy answered, but {error}", "give --store, the proxy's store")


def _key() -> dict[str, str]:
    """Return the header with an API key, if one is set."""
    from ratchet.tuning.context import first_api_key

    key = first_api_key()
    return {"authorization": f"Bearer {key}"} if key else {}


def missing_key_kinds(store: Store) -> str:
    """Describe the missing API key: the store knows the names of keys, not the keys."""
    from ratchet.store.states import KeyScope

    names = [key.name for key in store.keys.all() if key.revoked_at is None and key.scope == KeyScope.AGENT]
    known = f"the store knows agents' keys by the names {', '.join(names)}" if names else "the store has no agent's key"
    given = "the key in RATCHET_API_KEYS is none of them" if _key() else "RATCHET_API_KEYS is not set"
    return f"the proxy requires a key: {known}, and {given}"


def _read_back(store: Store, call_id: str, log: str) -> tuple[tuple[int, ...], CheckResult]:
    from ratchet.store.errors import RecordNotFound
    from ratchet.store.reasons import DropReason
    from ratchet.store.records import unpack_ids, unpack_logprobs
    from ratchet.store.states import CallState

    deadline, call = time.monotonic() + _WAIT_FOR_RECORD, None
    while time.monotonic() < deadline:
        try:
            call = store.calls.read(call_id)
        except RecordNotFound:
            call = None
        if call is not None and call.state is CallState.ANSWERED:
            break
        time.sleep(0.1)
    if call is None or call.state is not CallState.ANSWERED:
        seen = f"call {call_id or 'without id'} was answered and is not in the store"
        return (), CheckResult("capture", False, seen, f"{log} for errors of shipping")
    store.trajectories.seal(call.trajectory_id, time.time())
    store.trajectories.drop([call.trajectory_id], DropReason.DOCTOR)
    prompt, ids = unpack_ids(call.prompt_ids), unpack_ids(call.choices[0].token_ids)
    logprobs = unpack_logprobs(call.choices[0].logprobs)
    if not prompt or not ids or len(ids) != len(logprobs):
        seen = f"{call.id} has {len(prompt)} prompt ids, {len(ids)} sampled ids, {len(logprobs)} logprobs"
        return (), CheckResult(
            "capture", False, seen, "the engine returned no token ids: use vLLM 0.32, which supports return_token_ids"
        )
    seen = f"{call.id}: {len(prompt)} prompt ids, {len(ids)} sampled ids with logprobs"
    return (*prompt, *ids), CheckResult("capture", True, seen)
