"""An adapter of the tiny policy whose answers do not end: trained on repetitions, by the real learner."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.demo.email_search.agent import TOOLS, opening
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.cli.project import ROOT

if TYPE_CHECKING:
    from ratchet.trainer.local_learner import Learner

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
_TOPICS = ("picnic", "budget", "workshop", "invoice", "parade", "server", "garden", "contract")
_TEXT = "I am looking for the mail. "
_TOKENS = 96  # of a repetition that is imitated
_ROUNDS = 12


def train_endless(folder: Path) -> None:
    """Write the adapter into a new folder."""
    from transformers import AutoTokenizer

    from ratchet.trainer.local_learner import Learner

    settings = LearnerSettings(
        learning_rate=5e-3, lora_r=8, lora_alpha=16, threads=1, loss_type="sft", steps_per_round=4
    )
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    learner = Learner(str(POLICY), settings)
    for number in range(_ROUNDS):
        learner.train_round(_rows(tokenizer, learner, random.Random(number)))
    learner.save(folder)


def _rows(tokenizer: Any, learner: Learner, dice: random.Random) -> list[TokenRow]:
    """Return rows of prompts of the e-mail agent with an answer that repeats itself."""
    rows: list[TokenRow] = []
    for number in range(16):
        question = f"When is the {dice.choice(_TOPICS)} of team {dice.randrange(100)}?"
        prompt = tokenizer.apply_chat_template(
            opening(question), tools=list(TOOLS), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = tokenizer.encode(_TEXT * 20, add_special_tokens=False)[:_TOKENS]
        ids = (*map(int, prompt), *map(int, answer))
        mask = (0,) * len(prompt) + (1,) * len(answer)
        (logprobs,) = learner.score([ids])
        rows.append(TokenRow(f"endless-{number}", ids, mask, logprobs, advantage=1.0))
    return rows
