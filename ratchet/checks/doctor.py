"""`ratchet doctor`: checks that training can work, each against the running services.

    vllm       it is installed, answers, and loads adapters at run time
    capture    a call through the proxy is in the store with the engine's token ids and logprobs
    gradient   one learner round on tiny rows changes the adapter's weights
    swap       vLLM with that adapter returns the learner's logprobs, not the base model's
    batches    on a CPU: base model requests are correct in a batch with adapter requests
    judge      it returns scores, distinguishes answers and does not crash (`judge_quality_check.py`)

If resampling is on, `resampling_check.py` runs too.

Its trajectory is dropped at once and never trained; its adapter is unloaded. A failed check names the remedy, and
checks that depend on it report that. Only the learner's checks import torch.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.checks.check_result import CheckResult
from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.store.install_hint import install_hint
from ratchet.supervisor import vllm_command
from ratchet.supervisor.up import read_run_state

if TYPE_CHECKING:
    from ratchet.store.store import Store
    from ratchet.trainer.learner.learner import Learner

_WAIT_FOR_RECORD = 10.0  # seconds
_ANY_IDS = tuple(range(1, 25))  # used if no call was captured; in every vocabulary
_PROBES = 32  # prefixes whose next-token logprobs are compared
_TOLERANCE = 0.1  # nats, mean over the probe: bfloat16 serving against fp32 training


_WITH_A_KEY = (
    "run `RATCHET_API_KEYS=KEY ratchet doctor` with an agent's key (`ratchet keys create --name doctor` makes one)"
)
_NO_PROJECT = "start the project with `ratchet up --detach`, then run `ratchet doctor` again"


def run_checks(settings: Settings) -> Iterator[CheckResult]:
    """Yield the results in order."""
    running = read_run_state(settings.state)
    if not running.get("ready"):
        running = {}
    yield _vllm(settings, running)
    captured, finding = _capture(settings, running)
    yield finding
    with tempfile.TemporaryDirectory(prefix="ratchet-doctor-") as folder:
        learner, finding = _gradient(settings, running, captured, Path(folder))
        yield finding
        swapped = _swap(settings, running, learner, captured, Path(folder))
        yield swapped
        if swapped.passed and not vllm_command.has_visible_gpu(settings):
            yield _batches(settings, running, captured, Path(folder))
    from ratchet.checks.judge_quality_check import check_judge_quality
    from ratchet.checks.resampling_check import check_resampling, is_resampling_enabled

    yield check_judge_quality(settings)
    if is_resampling_enabled(settings):
        yield check_resampling(settings, running)


def _vllm(settings: Settings, running: dict[str, Any]) -> CheckResult:
    from ratchet.trainer.adapters.vllm_api import VllmServer
    from ratchet.trainer.errors import TrainerError

    try:
        vllm_command.check_installed(settings)
    except CliError as error:
        return CheckResult("vllm", False, "vLLM cannot be started", str(error))
    if not running:
        return CheckResult("vllm", False, f"installed; project {settings.project} is not up", _NO_PROJECT)
    url = running["vllm_url"]
    try:
        with contextlib.closing(VllmServer(url, timeout=30)) as replica:
            names = replica.models()
            can_load_adapters = replica.can_load_adapters()
    except TrainerError as error:
        return CheckResult("vllm", False, f"{url} does not answer like vLLM: {error}", _see(settings, "vllm"))
    if not can_load_adapters:
        return CheckResult(
            "vllm",
            False,
            f"{url} cannot load adapters at run time",
            "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as `ratchet up` does",
        )
    return CheckResult("vllm", True, f"{url} serves {', '.join(names)} and loads adapters at run time")


def _capture(settings: Settings, running: dict[str, Any]) -> tuple[tuple[int, ...], CheckResult]:
    """Return the prompt and answer ids of a recorded call, and the result."""
    import httpx

    from ratchet.store.store import open_store

    if not running:
        return (), CheckResult("capture", False, "not checked: no project is up", _NO_PROJECT)
    body = {
        "model": settings.model,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": f"doctor {time.time_ns()}: say something"}],
    }
    log = _see(settings, "proxy")
    try:
        answer = httpx.post(
            f"{running['base_url']}/chat/completions", json=body, headers=_key(), timeout=120, trust_env=False
        )
    except httpx.HTTPError as error:
        return (), CheckResult("capture", False, f"{running['base_url']} does not answer: {error}", log)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return (), CheckResult("capture", False, missing_key_kinds(settings.store_url), _WITH_A_KEY)
    if answer.status_code != httpx.codes.OK:
        return (), CheckResult("capture", False, f"the call failed: {answer.status_code} {answer.text[:300]}", log)
    store = open_store(settings.store_url)
    try:
        return _read_back(store, answer.headers.get("x-ratchet-call", ""), log)
    finally:
        store.close()


def _key() -> dict[str, str]:
    """Return the header with an API key, if one is set."""
    from ratchet.tuning.context import first_api_key

    key = first_api_key()
    return {"authorization": f"Bearer {key}"} if key else {}


def missing_key_kinds(store_url: str) -> str:
    """Describe the missing API key: the store knows the names of keys, not the keys."""
    from ratchet.store.states import KeyScope
    from ratchet.store.store import open_store

    store = open_store(store_url)
    try:
        names = [key.name for key in store.keys.all() if key.revoked_at is None and key.scope == KeyScope.AGENT]
    finally:
        store.close()
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


def _gradient(
    settings: Settings, running: dict[str, Any], captured: tuple[int, ...], folder: Path
) -> tuple[Learner | None, CheckResult]:
    """Return a learner after one round, and the result."""
    try:
        base_model = vllm_command.check_model(running.get("base_model") or settings.base_model)
        from ratchet.trainer.learner.learner import Learner
        from ratchet.trainer.rows.token_row import TokenRow
        from ratchet.trainer.settings.learner_settings import LearnerSettings

        own = dict(settings.trainer.get("learner", {}))
        # A large step: usual learning rates change the logprobs by less than bfloat16 resolves.
        learner = Learner(base_model, LearnerSettings(**(own | {"learning_rate": 3e-3})), workdir=folder)
        ids = captured or _ANY_IDS
        scored = learner.score([ids, ids[::-1]])
        rows = [
            TokenRow("doctor", row, (0, *(1,) * (len(row) - 1)), tuple(logprobs), advantage=advantage)
            for row, logprobs, advantage in zip((ids, ids[::-1]), scored, (1.0, -1.0), strict=True)
        ]
        report = learner.train_round(rows)
    except ImportError as error:
        return None, CheckResult("gradient", False, f"the learner cannot be imported: {error}", install_hint("trainer"))
    except Exception as error:  # noqa: BLE001 -- any error is the result of this check
        return None, CheckResult(
            "gradient", False, f"{type(error).__name__}: {error}", "check the base model (--base-model), or free memory"
        )
    if not report.weight_change > 0:
        remedy = "check trainer.learner.target_modules against the base model's layers"
        return None, CheckResult("gradient", False, "one round changed no weight", remedy)
    seen = f"one round on {report.tokens_trained} tokens moved the adapter by {report.weight_change:.4f} (norm)"
    return learner, CheckResult("gradient", True, seen)


def _swap(
    settings: Settings, running: dict[str, Any], learner: Learner | None, captured: tuple[int, ...], folder: Path
) -> CheckResult:
    if not running:
        return CheckResult("swap", False, "not checked: no project is up", _NO_PROJECT)
    if learner is None:
        return CheckResult("swap", False, "not checked: there is no trained adapter", "fix the gradient check first")
    from ratchet.trainer.adapters.vllm_api import VllmServer
    from ratchet.trainer.errors import TrainerError
    from ratchet.trainer.release.proof import ProofOutcome
    from ratchet.trainer.release.served_proof import prove_served

    probes = _probes(captured)
    tolerance = float(settings.trainer.get("proof_tolerance", _TOLERANCE))
    name = f"{settings.model}@doctor-{time.time_ns()}"
    replica = VllmServer(running["vllm_url"])
    try:
        learner.save(folder / "adapter")
        replica.load(name, folder / "adapter")
        base = vllm_command.served_name(settings.model)
        try:
            proof = prove_served(replica, name, {base: None}, probes, learner, tolerance=tolerance)
        finally:
            replica.unload(name)
    except TrainerError as error:
        return CheckResult("swap", False, str(error), _see(settings, "vllm"))
    finally:
        replica.close()
    if not proof.holds:
        remedy = "check that vLLM serves the same base model as the trainer loads"
        if proof.outcome is ProofOutcome.UNPROVEN:
            remedy = (
                "serve and train in float32, or check that both use the same numerics (quantisation, attention kernels)"
            )
        return CheckResult("swap", False, str(proof.reason), remedy)
    seen = (
        f"served logprobs changed by {proof.served_change:.4f} nats, the learner's by {proof.trained_change:.4f}; "
        f"they differ by {proof.served_vs_trainer:.4f} ({proof.tokens} tokens)"
    )
    return CheckResult("swap", True, seen)


def _batches(settings: Settings, running: dict[str, Any], captured: tuple[int, ...], folder: Path) -> CheckResult:
    """Check mixed batches with the adapter of the swap check."""
    from ratchet.checks.mixed_batch_check import check_batches
    from ratchet.trainer.adapters.vllm_api import VllmServer

    replica = VllmServer(running["vllm_url"])
    base = vllm_command.served_name(settings.model)
    try:
        return check_batches(replica, base, folder / "adapter", settings.vllm.max_loras, _probes(captured))
    finally:
        replica.close()


def _see(settings: Settings, service: str) -> str:
    return f"look at {settings.state.log(service)}"


def _probes(captured: tuple[int, ...]) -> list[tuple[int, ...]]:
    ids = captured or _ANY_IDS
    return [ids[:end] for end in range(len(ids), 1, -max(1, len(ids) // _PROBES))]
