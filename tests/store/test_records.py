"""The store's records: light to import, and made from rows."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ratchet.store.records import Prompt, Round, row_to
from ratchet.store.states import PromptMode, RoundState


@pytest.mark.parametrize("module", ["records", "operation_records", "states", "content.messages", "ids"])
def test_records_and_states_load_no_sqlalchemy(module: str) -> None:
    program = f"import sys, ratchet.store.{module}; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_row_becomes_a_record_with_its_enums() -> None:
    row = SimpleNamespace(id="prm_1", mode="append", text="Be brief.", origin="me", created_at=1.0, families={})
    prompt = row_to(Prompt, row, origin="you")
    assert (prompt.mode, prompt.text, prompt.origin) == (PromptMode.APPEND, "Be brief.", "you")


def test_a_column_without_a_value_is_none() -> None:
    times = {"started_at": 1.0, "ended_at": None}
    row = SimpleNamespace(
        id="rnd_1", alias="a", state="started", from_version=0, to_version=None, checkpoint=None, metrics={},
        reason=None, **times,
    )  # fmt: skip
    assert row_to(Round, row) == Round(
        id="rnd_1", alias="a", state=RoundState.STARTED, from_version=0, to_version=None, checkpoint=None, metrics={},
        reason=None, started_at=1.0, ended_at=None,
    )  # fmt: skip
