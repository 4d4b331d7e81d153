"""A short durability campaign with both databases; `benchmarks/durability.py` runs the long one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.harness.durability.campaign import DurabilityCampaign, DurabilityOutcome, run
from tests.harness.postgres import postgres_server
from tests.harness.proxy.servers import VllmProcess, eventually

pytestmark = pytest.mark.slow


def _kept(outcome: DurabilityOutcome) -> None:
    assert outcome.violations == []
    assert outcome.answered > 100
    assert outcome.stored["answered"] >= outcome.answered


def _let_calls_go_on(campaign: DurabilityCampaign) -> None:
    known = len(campaign.load.answered)
    time.sleep(2.0)
    eventually(lambda: len(campaign.load.answered) > known + 50)


def test_ten_kills_and_outages_of_sqlite_lose_and_duplicate_no_answered_call(tmp_path: Path) -> None:
    outcome = run(tmp_path, kills=10, outages=2, seconds=1.0)
    assert (sum(outcome.kills.values()), outcome.outages) == (10, {"locked": 1, "moved": 1})
    _kept(outcome)


@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_kills_and_a_killed_postgresql_lose_and_duplicate_no_answered_call(tmp_path: Path) -> None:
    with postgres_server() as server:
        outcome = run(tmp_path, kills=4, outages=1, seconds=2.0, server=server)
    assert outcome.outages == {"killed": 1}
    _kept(outcome)


@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_a_postgresql_that_is_read_only_for_a_while_refuses_no_record(tmp_path: Path) -> None:
    vllm = VllmProcess()
    try:
        with postgres_server() as server:
            url = sa.make_url(server.url).set(drivername="postgresql+psycopg")
            admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
            campaign = DurabilityCampaign(tmp_path, vllm.url, server)
            try:
                campaign.load.start()
                with admin.connect() as connection:
                    for state in ("on", "off"):  # as a standby, or a server whose disk is full
                        connection.exec_driver_sql(f"ALTER SYSTEM SET default_transaction_read_only = {state}")
                        connection.exec_driver_sql("SELECT pg_reload_conf()")
                        _let_calls_go_on(campaign)
                outcome = campaign.end()
            finally:
                campaign.abandon()
                admin.dispose()
    finally:
        vllm.kill()
    _kept(outcome)
