"""`ratchet doctor`: checks that training can work, each against the running services.

    memory     with a GPU: vLLM and learner fit, by formula
    vllm       it is installed, answers, loads adapters at run time and serves several safely
    adapters   the place of `adapters.store` can be written and read, if it is set
    capture    a call through the proxy is in the store with the engine's token ids and logprobs
    gradient   one round of the learner on tiny rows changes the adapter's weights (`learner_check.py`)
    swap       vLLM with that adapter returns the learner's logprobs, not the base model's
    batches    on a CPU: base model requests are correct in a batch with adapter requests
    judge      it returns scores, distinguishes answers and does not crash (`judge_quality_check.py`)
    teacher    instead of `judge`, with a teacher: it scores token ids and has the policy's tokens
    resampling if it is on: vLLM reports its load, and the proxy accepts the trainer's own key

With --proxy, the call goes through that proxy. If no project is up, its services were started separately: `vllm`,
`swap`, `batches`, `teacher` and `resampling` are then skipped. Of several agents, each gets the checks capture, judge
and resampling; the others concern what all agents share.

Its trajectory is dropped at once and never trained; its adapter is unloaded. A failed check names the remedy, and
checks that depend on it report that. Only a learner's check without a running learner imports torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx

from ratchet.checks.check_result import NO_PROJECT, PATIENCE, CheckResult, call_proxy, no_project, see_log
from ratchet.checks.judge_quality_check import JudgeExample, check_judge_quality
from ratchet.checks.learner_check import check_learner
from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.store.errors import RecordNotFound, StoreError
from ratchet.store.reasons import DropReason
from ratchet.store.records import unpack_ids, unpack_logprobs
from ratchet.store.states import CallState, KeyScope
from ratchet.store.store import Store, open_store
from ratchet.supervisor import preflight_checks, vllm_command
from ratchet.supervisor.up import read_run_state
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.adapters.vllm_api import VllmServer, load_of
from ratchet.trainer.collect.resampler import KEY_VARIABLE
from ratchet.trainer.errors import CheckpointError, EngineUnreachable, TrainerError
from ratchet.trainer.judges.kinds.teacher import TeacherJudge
from ratchet.trainer.settings.judge_specs import TeacherSpec
from ratchet.tuner.rollouts.runner import first_api_key

_WAIT_FOR_RECORD = 10.0  # seconds
_FIRST_SAFE_RELEASE = (0, 26)
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
    agents = [settings.for_agent(name) for name in settings.agents_by_name]
    if (memory := check_memory(settings)) is not None:
        yield memory
    yield _vllm(settings, running)
    if settings.adapters.store is not None:
        yield _adapter_store(settings, settings.adapters.store)
    captured: tuple[int, ...] = ()
    announce("capture")
    for agent in agents:
        ids, finding = _capture(agent, running)
        captured = captured or ids
        yield _of(agent, agents, finding)
    yield from check_learner(agents[0], running, captured, announce)
    announce("judge")
    for agent in agents:
        taught = has_teacher(agent)
        yield _of(agent, agents, check_teacher(agent, running) if taught else check_judge_quality(agent, example))
        if is_resampling_enabled(agent):
            yield _of(agent, agents, check_resampling(agent, running))


def _of(agent: Settings, agents: list[Settings], finding: CheckResult) -> CheckResult:
    """Return the result with the agent's name, if there are several."""
    return replace(finding, seen=f"{agent.model}: {finding.seen}") if len(agents) > 1 else finding


def check_memory(settings: Settings) -> CheckResult | None:
    """Return whether base model, vLLM and learner fit their GPUs; None without a GPU."""
    if not vllm_command.has_visible_gpu(settings):
        return None
    try:
        planned = preflight_checks.plan_memory(settings)
    except CliError as error:
        return CheckResult("memory", False, "the base model does not fit", str(error))
    return CheckResult("memory", True, "; ".join(planned.notes) or "vLLM and the learner fit their GPUs")


def _vllm(settings: Settings, running: dict[str, Any]) -> CheckResult:
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
            names, can_load, problem = replica.models(), replica.can_load_adapters(), describe_problem(replica)
    except TrainerError as error:
        return CheckResult("vllm", False, f"{url} does not answer like vLLM: {error}", see_log(settings, "vllm"))
    if not can_load:
        remedy = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as `ratchet up` does"
        return CheckResult("vllm", False, f"{url} cannot load adapters at run time", remedy)
    if problem is not None:
        return CheckResult("vllm", False, *problem)
    return CheckResult("vllm", True, f"{url} serves {', '.join(names)} and loads adapters at run time")


def describe_problem(replica: VllmServer) -> tuple[str, str] | None:
    """Return why a server cannot serve several adapters safely, and the remedy; None if it can. Raises EngineError.

    Before 0.26.0, a load that evicted an adapter in use let running requests continue with another adapter's weights
    (vLLM issue 47724, mended by pull request 47725). A server with data parallelism loads an adapter on one of its
    engines only.
    """
    release = replica.release()
    numbers = re.match(r"(\d+)\.(\d+)", release or "")
    if numbers and (int(numbers[1]), int(numbers[2])) < _FIRST_SAFE_RELEASE:
        return (
            f"{replica.url} runs vLLM {release}, which may answer with another adapter's weights during a load",
            "install vLLM 0.26.0 or later (Ratchet is tested with 0.32.0)",
        )
    engines = replica.engines()
    if engines > 1:
        return (
            f"{replica.url} has {engines} engines (--data-parallel-size), and loads an adapter on one of them only",
            "start one server for each engine, without --data-parallel-size, and name each as a replica",
        )
    return None


def _adapter_store(settings: Settings, store: str) -> CheckResult:
    """Write, read and remove one small object, with this machine's credentials."""
    try:
        AdapterStore(settings.state.adapter_cache).check(store)
    except CheckpointError as error:
        return CheckResult("adapters", False, str(error), "correct that, then run `ratchet doctor` again")
    return CheckResult("adapters", True, f"{store} can be written, read and listed")


def _capture(settings: Settings, running: dict[str, Any]) -> tuple[tuple[int, ...], CheckResult]:
    """Return the prompt and answer ids of a recorded call, and the result."""
    if not running:
        return (), no_project("capture", running)
    question = {"role": "user", "content": f"doctor {time.time_ns()}: say something"}
    body = {"model": settings.model, "max_tokens": 8, "messages": [question]}
    key = first_api_key()
    log = see_log(settings, "proxy") if "vllm_url" in running else "look at the proxy's log"
    try:
        answer = call_proxy(
            "POST", f"{running['base_url']}/chat/completions", PATIENCE, json=body,
            headers={"authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
    except httpx.HTTPError as error:
        return (), CheckResult("capture", False, f"{running['base_url']} does not answer: {error}", log)
    if answer.status_code not in (httpx.codes.OK, httpx.codes.UNAUTHORIZED):
        return (), CheckResult("capture", False, f"the call failed: {answer.status_code} {answer.text[:300]}", log)
    try:
        with open_store(settings.store_url, create=False) as store:
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                return (), CheckResult("capture", False, missing_key_kinds(store), _WITH_A_KEY)
            return _read_back(store, answer.headers.get("x-ratchet-call", ""), log)
    except StoreError as error:
        return (), CheckResult("capture", False, f"the proxy answered, but {error}", "give --store, the proxy's store")


def missing_key_kinds(store: Store) -> str:
    """Describe the missing API key: the store knows the names of keys, not the keys."""
    names = [key.name for key in store.keys.all() if key.revoked_at is None and key.scope == KeyScope.AGENT]
    known = f"the store knows agents' keys by the names {', '.join(names)}" if names else "the store has no agent's key"
    given = "the key in RATCHET_API_KEYS is none of them" if first_api_key() else "RATCHET_API_KEYS is not set"
    return f"the proxy requires a key: {known}, and {given}"


def _read_back(store: Store, call_id: str, log: str) -> tuple[tuple[int, ...], CheckResult]:
    deadline, call = time.monotonic() + _WAIT_FOR_RECORD, None
    while (call is None or call.state is not CallState.ANSWERED) and time.monotonic() < deadline:
        with contextlib.suppress(RecordNotFound):
            call = store.calls.read(call_id)
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
        remedy = "the engine returned no token ids: use vLLM 0.32, which supports return_token_ids"
        return (), CheckResult("capture", False, seen, remedy)
    seen = f"{call.id}: {len(prompt)} prompt ids, {len(ids)} sampled ids with logprobs"
    return (*prompt, *ids), CheckResult("capture", True, seen)


def has_teacher(settings: Settings) -> bool:
    """Return whether the judge is a teacher."""
    return isinstance(settings.trainer.judge, TeacherSpec)


def check_teacher(settings: Settings, running: Mapping[str, Any]) -> CheckResult:
    """Send a few short texts to be tokenized to both servers, and three token ids to be scored to the teacher."""
    if "vllm_url" not in running:
        return no_project("teacher", running)
    try:
        spec = settings.trainer.judge
        assert isinstance(spec, TeacherSpec)
        policy = VllmServer(running["vllm_url"], timeout=30, key=os.environ.get("RATCHET_UPSTREAM_API_KEY"))
        with (
            contextlib.closing(policy),
            contextlib.closing(TeacherJudge(spec, os.environ, policy=lambda: policy)) as one,
        ):
            max_length = one.check()
    except EngineUnreachable as error:
        remedy = "start the teacher's vLLM; until it answers, trajectories wait"
        return CheckResult("teacher", False, str(error), remedy)
    except (TrainerError, CliError) as error:
        return CheckResult("teacher", False, str(error), "correct trainer.judge, or the entry of model_list")
    limit = f", up to {max_length} tokens" if max_length else ""
    return CheckResult("teacher", True, f"{spec.model} at {spec.base_url} scores the policy's token ids{limit}")


def is_resampling_enabled(settings: Settings) -> bool:
    """Return whether the trainer samples further answers to recorded prompts."""
    return settings.trainer.resample.samples > 0


def check_resampling(settings: Settings, running: dict[str, Any]) -> CheckResult:
    """Ask vLLM for its load, and the proxy with the trainer's own key; no token is generated."""
    name = "resampling"
    if "vllm_url" not in running:
        return no_project(name, running)
    load = load_of([running["vllm_url"]], os.environ.get("RATCHET_UPSTREAM_API_KEY"))
    if load.unknown is not None:
        return CheckResult(name, False, load.unknown, "remove --disable-log-stats from vllm.extra_args")
    key, url = os.environ.get(KEY_VARIABLE, "none"), running["base_url"]
    try:
        answer = call_proxy("GET", f"{url}/models", 30, headers={"authorization": f"Bearer {key}"})
    except httpx.HTTPError as error:
        return CheckResult(name, False, f"{url} does not answer: {error}", "look at the proxy's log")
    if answer.status_code != httpx.codes.OK:
        seen = f"the proxy refuses the trainer's key ({answer.status_code})"
        remedy = f"`ratchet keys create --name resampling`, and start with {KEY_VARIABLE}=KEY"
        return CheckResult(name, False, seen, remedy)
    seen = f"vLLM runs {load.running} calls now, {load.waiting} wait; the proxy accepts the key"
    return CheckResult(name, True, seen)
