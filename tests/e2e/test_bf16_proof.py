"""The proof of a swap on a real pretrained model that vLLM serves in bf16, for a step that bf16 does not show."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ratchet.demo.pretrained_model import model_folder
from ratchet.settings.project_settings import Settings
from ratchet.trainer.adapters.adapter_store import amplified
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.release.proof import Proof, ProofOutcome, SwapProver, TrainerLogprobs
from ratchet.trainer.rows.token_row import TokenRow, contexts
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.vllm.engine import VllmServerProcess

_GOOD, _BAD = ("splendid", "great", "lovely", "superb", "fine"), ("awful", "poor", "dreadful", "bad", "dull")
_THINGS = ("meal", "film", "book", "hotel", "ride", "show", "soup", "phone")


class AliasedServer(VllmServer):
    """The real vLLM, which answers under some names as under others."""

    answers_as: dict[str, str]

    def next_logprobs(self, name: str, prompts: Sequence[Sequence[int]], count: int) -> list[dict[int, float]]:
        return super().next_logprobs(self.answers_as.get(name.partition("x")[0], name), prompts, count)


@dataclass
class Bf16Model:
    """SmolLM2-135M-Instruct in vLLM in bf16 and in a learner in float32, which has made version 1 in one small step."""

    server: AliasedServer
    learner: Learner
    rows: list[TokenRow]
    version: str

    def prove(self) -> Proof:
        base = next(name for name in self.server.models() if "@" not in name or name.endswith("@0"))
        prover = SwapProver(
            "agent@1", self.version, {base: None}, contexts(self.rows), TrainerLogprobs(self.learner), 0.1
        )
        return prover.prove([self.server], {self.server.url: prover.measure(self.server)})[self.server.url]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bf16Model]:
    folder, work = model_folder(), tmp_path_factory.mktemp("work")
    settings = {"base_model": str(folder), "vllm": {"max_model_len": 256, "dtype": "bfloat16"}}
    process = VllmServerProcess(Settings.of(settings), work / "vllm.log")
    try:
        learner = Learner(str(folder), LearnerSettings(learning_rate=2e-5, dtype="float32"))
        rows = labelled_reviews(folder, learner)
        learner.train_round(rows)
        learner.save(work / "0001")
        process.wait()
        server = AliasedServer(process.url, 300.0)
        server.load("agent@1", work / "0001")
        yield Bf16Model(server, learner, rows, str(work / "0001"))
        server.close()
    finally:
        process.kill()


def labelled_reviews(folder: Path, learner: Learner) -> list[TokenRow]:
    """Rows with the right label, which is rewarded, or the wrong one."""
    tokenizer, dice = AutoTokenizer.from_pretrained(folder), random.Random(0)
    sequences = []
    for place in range(24):
        good, right = place % 2 == 0, place % 4 < 2
        review = f"Review: The {dice.choice(_THINGS)} was {dice.choice(_GOOD if good else _BAD)}. Positive or negative?"
        turns = [{"role": "user", "content": review}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer.encode("positive" if good == right else "negative", add_special_tokens=False)
        sequences.append(((*prompt, *answer), (0,) * len(prompt) + (1,) * len(answer), 1.0 if right else -1.0))
    scored = learner.score([ids for ids, _, _ in sequences])
    named = enumerate(zip(sequences, scored, strict=True))
    return [TokenRow(str(n), ids, mask, logprobs, advantage) for n, ((ids, mask, advantage), logprobs) in named]


@pytest.mark.e2e
def test_a_step_that_bf16_hides_is_proven_by_its_amplified_copy(model: Bf16Model) -> None:
    model.server.answers_as = {}
    found = model.prove()
    assert (found.outcome, found.reason) == (ProofOutcome.PROVEN, None)
    assert found.factor is not None
    assert found.factor >= 4
    assert found.slope > 0.7
    assert found.correlation > 0.9
    assert [name for name in model.server.models() if "x" in name] == [], "no copy stays"


@pytest.mark.e2e
def test_an_adapter_that_is_never_applied_is_rejected_in_bf16(model: Bf16Model) -> None:
    base = next(name for name in model.server.models() if "@" not in name or name.endswith("@0"))
    model.server.answers_as = {"agent@1": base}
    found = model.prove()
    assert found.outcome is ProofOutcome.WRONG
    assert "the adapter is not applied" in str(found.reason)


@pytest.mark.e2e
def test_an_amplified_copy_under_the_served_name_is_rejected_in_bf16(model: Bf16Model) -> None:
    with amplified(model.version, 64.0) as copy:
        VllmServer.load(model.server, "copy", copy)
        model.server.answers_as = {"agent@1": "copy"}
        assert model.prove().outcome is ProofOutcome.WRONG
        model.server.unload("copy")
