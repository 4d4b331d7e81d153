"""Measure a served version: compare logprobs of vLLM replicas with the trainer's, for `proof.py`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import EngineError, TrainerError
from ratchet.trainer.learner_api.protocol import LogprobScorer
from ratchet.trainer.release.proof import Proof, ProofOutcome, VersionLogprobs, prove

_TOKENS = 3  # most likely next tokens that are compared after each probe
_REQUESTED_TOKENS = 20  # of every version, so that those are among them; vLLM returns no more by default

Probes = Sequence[Sequence[int]]  # sequences of token ids


class ProofFailed(TrainerError):
    """No replica serves the candidate as the trainer made it, or it is unproven; `proofs` are those made so far."""

    def __init__(self, reason: str, outcome: ProofOutcome, proofs: dict[str, Proof]) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.proofs = proofs


@dataclass(frozen=True, slots=True)
class ServedLogprobs:
    """What one replica answers: the likeliest next tokens after each probe, of a version and of older names."""

    new: Sequence[Mapping[int, float]]
    old: Mapping[str, Sequence[Mapping[int, float]]]


class TrainerLogprobs:
    """The trainer's logprobs of a version, True or its reference, and of older ones. Nothing is computed twice: the
    replicas are mostly asked about the same tokens.
    """

    def __init__(self, scorer: LogprobScorer, version: bool | str = True) -> None:
        self._scorer = scorer
        self.version = version
        self._known: dict[bool | str, dict[tuple[int, ...], float]] = {}

    def score(self, sequences: Sequence[tuple[int, ...]], adapter: bool | str) -> list[float]:
        """Return the logprob of the last token of each sequence."""
        known = self._known.setdefault(adapter, {})
        missing = list(dict.fromkeys(sequence for sequence in sequences if sequence not in known))
        if missing:
            scored = self._scorer.score(missing, adapter=adapter)
            known |= {sequence: logprobs[-1] for sequence, logprobs in zip(missing, scored, strict=True)}
        return [known[sequence] for sequence in sequences]


class OldLogprobs:
    """What the replicas answer under the names of older versions; may be asked for while a round still trains."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # of the probes
        self._answers: dict[tuple[str, str], Future[Sequence[Mapping[int, float]]]] = {}  # by URL and name

    def ask(self, replicas: Sequence[VllmServer], names: Sequence[str], probes: Probes) -> None:
        """Ask each replica in a thread of its own; does not wait."""
        self._places, self._answers = {tuple(ids): place for place, ids in enumerate(probes)}, {}
        for replica in replicas:
            answers = {name: Future[Sequence[Mapping[int, float]]]() for name in names}
            self._answers |= {(replica.url, name): answer for name, answer in answers.items()}
            threading.Thread(
                target=_ask_old, args=(replica, answers, probes), name=f"ask {replica.url}", daemon=True
            ).start()

    def answer_of(self, replica: VllmServer, name: str, probes: Probes) -> Sequence[Mapping[int, float]]:
        """Return what a replica answers: to `ask`, if that was about these probes among others, else now.

        Raises EngineUnreachable, AdapterRefused.
        """
        places = [self._places.get(tuple(ids)) for ids in probes]
        earlier = self._answers.get((replica.url, name))
        if earlier is not None and None not in places:
            try:
                answers = earlier.result()
                return [answers[place] for place in places if place is not None]
            except EngineError:  # the version may have been loaded since
                pass
        return replica.next_logprobs(name, probes, _REQUESTED_TOKENS)


def _ask_old(replica: VllmServer, answers: Mapping[str, Future[Sequence[Mapping[int, float]]]], probes: Probes) -> None:
    for name, answer in answers.items():
        try:
            answer.set_result(replica.next_logprobs(name, probes, _REQUESTED_TOKENS))
        except Exception as error:  # noqa: BLE001 -- raised in the thread that wants the answer
            answer.set_exception(error)


def measure_served(
    replica: VllmServer, name: str, old: Sequence[str], probes: Probes, known: OldLogprobs | None = None
) -> ServedLogprobs:
    """Ask a replica for the next-token logprobs after each probe. Raises EngineUnreachable, AdapterRefused."""
    older = known or OldLogprobs()
    new = replica.next_logprobs(name, probes, _REQUESTED_TOKENS)
    return ServedLogprobs(new, {other: older.answer_of(replica, other, probes) for other in old})


def compare_served(
    served: ServedLogprobs, old: Mapping[str, str | None], probes: Probes, trainer: TrainerLogprobs, *, tolerance: float
) -> Proof:
    """Compare what a replica answers with the trainer.

    `old` maps each older name to its adapter's reference, None for the base model.
    """
    compared = [
        (place, token)
        for place, likeliest in enumerate(served.new)
        for token in _common_tokens(likeliest, [logprobs[place] for logprobs in served.old.values()])
    ]
    sequences = [(*probes[place], token) for place, token in compared]
    return prove(
        [place for place, _ in compared],
        VersionLogprobs(
            [served.new[place][token] for place, token in compared], trainer.score(sequences, trainer.version)
        ),
        {
            other: VersionLogprobs(
                [served.old[other][place].get(token) for place, token in compared],
                trainer.score(sequences, reference or False),
            )
            for other, reference in old.items()
        },
        tolerance=tolerance,
    )


def prove_served(
    replica: VllmServer,
    name: str,
    old: Mapping[str, str | None],
    probes: Probes,
    scorer: LogprobScorer,
    *,
    tolerance: float,
) -> Proof:
    """Measure one replica and compare; the scorer holds the version. Raises EngineUnreachable, AdapterRefused."""
    served = measure_served(replica, name, list(old), probes)
    return compare_served(served, old, probes, TrainerLogprobs(scorer), tolerance=tolerance)


def _common_tokens(likeliest: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> list[int]:
    """Return the most likely tokens, those first whose logprob every version returned."""
    known = sorted(likeliest, key=lambda token: (sum(token not in other for other in others), -likeliest[token]))
    return known[:_TOKENS]
