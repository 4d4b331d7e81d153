"""`ratchet doctor` with resampling on: vLLM reports its load, and the proxy accepts the trainer's key."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.checks.doctor import check_resampling, is_resampling_enabled
from ratchet.settings.project_settings import Settings
from ratchet.store.store import open_store
from ratchet.trainer.controller.collect.resampler import KEY_VARIABLE
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.proxy.test_keys import made

SETTINGS = Settings.of({"trainer": {"resample": {"samples": 2}}})


@pytest.mark.slow
def test_each_obstacle_to_resampling_is_reported_with_its_remedy(
    tmp_path: Path, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_resampling_enabled(SETTINGS)
    assert not is_resampling_enabled(Settings.of({}))
    assert "ratchet up" in check_resampling(SETTINGS, {}).remedy
    store, engine = open_store(str(store_file)), ScriptedEngine(lambda name, ids: 0.0)
    with served(ScriptedVllm()) as url, running(url, store, tmp_path) as proxy:
        project = {"vllm_url": engine.url, "base_url": f"{proxy.url}/v1"}
        engine.load = None
        assert "--disable-log-stats" in check_resampling(SETTINGS, project).remedy
        engine.load = (3, 1)
        assert check_resampling(SETTINGS, project).passed
        key, _ = made(store)
        eventually(lambda: proxy.http.get("/v1/models").status_code == 401)
        refused = check_resampling(SETTINGS, project)
        assert (refused.passed, KEY_VARIABLE in refused.remedy) == (False, True)
        monkeypatch.setenv(KEY_VARIABLE, key)
        assert check_resampling(SETTINGS, project).passed
    engine.close()
    store.close()
