"""Plug-ins: an installed package of its own is listed and loaded; the optional features are loaded the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from pydantic import TypeAdapter

from ratchet.store.store import open_store
from ratchet.trainer.advantages import cohort_advantages, group_advantages
from ratchet.trainer.errors import JudgeError, NoLearningSignal, PluginError, SettingError, TuningError
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.observability.monitors import check_installed, monitored
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.judge_specs import JudgeSpec, read_spec
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.user_code import (
    JUDGES,
    MONITORS,
    OWN_PLUGINS,
    PROMPT_OPTIMIZERS,
    load_plugin,
    plugin_names,
)
from ratchet.tuner.prompts.optimizer import load_optimizer
from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.packages import environment_without_plugins, register
from tests.harness.trainer.tiny import build_tiny_model
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompt_fakes import WorldEvaluate, search
from tests.trainer.test_metrics import committed_round
from tests.trainer.test_ruler import member
from tests.tuner.test_prompt_optimizers import reflection

FIELDS = {
    "vllm": ["http://x"], "model": "agent", "base_model": "b", "store": "x", "checkpoints": "c", "judge": "a:b",
}  # fmt: skip
PACKAGE = Path(__file__).parents[1] / "harness" / "plugin_example"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example package."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "ratchet_plugin_example.py"):
        (source / name).write_bytes((PACKAGE / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.slow
def test_what_pip_installs_is_listed_beside_what_ratchet_registers(installed: Path) -> None:
    assert plugin_names(PROMPT_OPTIMIZERS)[:2] == ["best_of", "gepa"]
    assert "brevity" in plugin_names(JUDGES)
    assert "json_lines" in plugin_names(MONITORS)


def test_a_plugin_estimator_gives_the_advantages_of_groups(installed: Path) -> None:
    assert group_advantages([1.0, 2.0, 9.0], "median") == (-1.0, 0.0, 7.0)
    assert group_advantages([2.0, 2.0], "median") == (0.0, 0.0)
    assert cohort_advantages([0.0, 1.0], "median") == cohort_advantages([0.0, 1.0], "dr_grpo")
    settings = TrainerSettings.model_validate(FIELDS | {"advantage_estimator": "median"})
    assert settings.advantage_estimator == "median"
    with pytest.raises(ValueError, match=r"'medium' is no advantage estimator; use one of grpo, .* plug-in: median"):
        TrainerSettings.model_validate(FIELDS | {"advantage_estimator": "medium"})


def test_an_estimator_that_gives_too_few_numbers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "few.py").write_text(
        "from ratchet.trainer.settings.objectives import AdvantageFunctions\n"
        "ONE = AdvantageFunctions(lambda scores: scores[:1])\n"
    )
    register(tmp_path, "few", "[ratchet.advantage_estimators]\none = few:ONE\nwrong = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"estimator 'one' returned \[1\.0\] for 2 scores"):
        group_advantages([1.0, 2.0], "one")
    with pytest.raises(PluginError, match=r"'wrong' is a function: it must be AdvantageFunctions"):
        group_advantages([1.0, 2.0], "wrong")


def test_a_plugin_objective_trains_what_its_advantages_say(installed: Path, tmp_path: Path) -> None:
    tiny_model = build_tiny_model(tmp_path / "model")
    settings = LearnerSettings(loss_type="positive_only", learning_rate=1e-3)
    learner = Learner(str(tiny_model), settings)
    good, bad = (tuple(range(start, start + 12)) for start in (5, 40))
    before = [fmean(row) for row in learner.score([good, bad])]
    rows = [
        TokenRow("t", ids, (0, *(1,) * 11), tuple(logprobs), advantage=advantage)
        for ids, logprobs, advantage in zip((good, bad), learner.score([good, bad]), (1.0, -1.0), strict=True)
    ]
    learner.train_round(rows)
    after = [fmean(row) for row in learner.score([good, bad])]
    assert after[0] > before[0]
    with pytest.raises(NoLearningSignal):
        learner.train_round(rows[1:])


def test_an_unknown_or_wrong_objective_is_refused_with_the_names(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SettingError, match=r"learner\.loss_type is 'ppo'; it must be one of dapo, .*plug-in: .*positive_only"
    ):
        LearnerSettings(loss_type="ppo")
    register(tmp_path, "odd", "[ratchet.objectives]\nnumber = math:pi\nabsent = no_such_module:X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingError, match=r"whose plug-in is a float: it must be an Objective"):
        LearnerSettings(loss_type="number")
    with pytest.raises(SettingError, match=r"'absent': plug-in 'absent' .*cannot be imported"):
        LearnerSettings(loss_type="absent")


def test_a_plugin_optimizer_improves_a_prompt(installed: Path, reflection_server: ScriptedReflectionModel) -> None:
    evaluate = WorldEvaluate()
    load_optimizer("best_of").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    score, prompt = evaluate.best()
    assert prompt != prompt_world.SEED
    assert score > 0


def test_a_plugin_judge_scores_by_its_settings_alone_and_as_a_part(installed: Path) -> None:
    brevity = {"kind": "brevity", "max_chars": 10}
    parts = [{"name": "short", "weight": 1.0, "judge": brevity}]
    answer = member("t", [{"role": "assistant", "content": "Oslo."}])
    for spec in (brevity, {"kind": "composite", "parts": parts}):
        judge = make_judge(read_spec(spec), {})
        assert [verdict.score for verdict in judge.judge(None, [answer]).verdicts] == [0.5]
        judge.close()
    stored = TypeAdapter(JudgeSpec).dump_python(read_spec(brevity), mode="json")
    assert make_judge(read_spec(stored), {}).version == "1/10"


def test_a_plugin_judge_that_cannot_be_made_is_named(installed: Path) -> None:
    with pytest.raises(JudgeError, match=r"judge brevity: .*ValueError: invalid literal"):
        make_judge(read_spec({"kind": "brevity", "max_chars": "ten"}), {})
    with pytest.raises(JudgeError, match=r"judge brevity: .*unknown settings \['max_char'\]: the only one"):
        make_judge(read_spec({"kind": "brevity", "max_char": 200}), {})


def test_an_unknown_kind_is_refused_with_the_built_in_kinds_and_the_plugins(installed: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown kind 'brevety': built in are function, .*plug-ins: .*brevity"):
        read_spec({"kind": "brevety"})


def test_a_plugin_monitor_receives_the_rounds_of_training(installed: Path, tmp_path: Path) -> None:
    fields = {"store": "x", "model": "agent", "base_model": "b", "vllm": ["http://x"], "checkpoints": tmp_path}
    settings = TrainerSettings.model_validate(fields | {"judge": "a:b", "report_to": ["json_lines"]})
    check_installed(settings.report_to)
    with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        committed_round(store, 1)
        with monitored(store, "agent", settings.report_to, tmp_path, last_look=60.0):
            pass
    lines = [json.loads(line) for line in (tmp_path / "json_lines" / "points.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["agent@1"] * len(lines)
    assert lines[0]["round/reward"] == 0.5


def test_a_missing_plugin_is_refused_with_the_group_and_the_installed_names() -> None:
    with pytest.raises(
        TuningError, match=r"--method guess: .*ratchet\.prompt_optimizers \(installed: gepa.*correct the name"
    ):
        load_optimizer("guess")


def test_a_plugin_of_ratchets_own_that_is_not_installed_is_named_with_its_distribution(tmp_path: Path) -> None:
    program = (
        "from ratchet.trainer.errors import PluginError\n"
        "from ratchet.trainer.user_code import OWN_PLUGINS, load_plugin\n"
        "for group, name in [(group, name) for group, names in OWN_PLUGINS.items() for name in names]:\n"
        "    try: load_plugin(group, name)\n"
        "    except PluginError as error: print(error)\n"
    )
    command = [sys.executable, "-S", "-c", program]
    environ = environment_without_plugins(tmp_path)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    folders = [folder for names in OWN_PLUGINS.values() for folder in names.values()]
    for folder, error in zip(folders, done.stdout.splitlines(), strict=True):
        assert f"install ratchet-rl-{folder}, " in error
        assert f"pip install ./plugins/{folder}" in error


def test_code_for_a_plugin_that_is_not_installed_is_refused_with_its_distribution(tmp_path: Path) -> None:
    program = (
        "import importlib\n"
        "from ratchet.errors import RatchetError\n"
        "from ratchet.trainer.judges.kinds.function import FunctionJudge\n"
        "from ratchet.tuner.rollouts.workflow import FunctionWorkflow\n"
        "async def workflow(task, model: 'ChatModelBase'): return task\n"
        "async def judge(response, auxiliary_models): return len(response)\n"
        "for made, given in [(FunctionWorkflow, workflow), (FunctionJudge, judge),\n"
        "                    (importlib.import_module, 'ratchet.agentscope'),\n"
        "                    (importlib.import_module, 'ratchet.environments.verifiers')]:\n"
        "    try: made(given)\n"
        "    except RatchetError as error: print(error)\n"
    )
    environ = environment_without_plugins(tmp_path)
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    errors = done.stdout.splitlines()
    assert [error.rpartition("pip install ./plugins/")[2] for error in errors] == ["agentscope"] * 3 + ["verifiers"]
    assert "takes what AgentScope's tuner gives" in errors[0]


def test_a_plugin_that_cannot_be_imported_names_its_distribution_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    register(
        tmp_path, "broken", "[ratchet.judges]\nabsent = no_such_module:Judge\nextra = no_such_module:Judge [llm]\n"
        "leaves = leaves:Judge\n",
    )  # fmt: skip
    register(tmp_path, "ratchet-rl-own", "[ratchet.judges]\nown = no_such_module:Judge\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = {
        "absent": r"ratchet\.judges \(no_such_module:Judge, from broken 2\.1\).*No module named.*missing module",
        "extra": r"pip install 'broken\[llm\]'",
        "leaves": r"SystemExit: 3; update broken",
        "own": r"ratchet-rl-own 2\.1\).*No module named.*install ratchet-rl-own.*pip install \./plugins/own",
    }
    for name, message in expected.items():
        with pytest.raises(PluginError, match=message):
            load_plugin(JUDGES, name)


def test_a_name_that_two_distributions_register_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "first", "[ratchet.judges]\nsame = json:loads\n")
    register(tmp_path, "second", "[ratchet.judges]\nsame = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match=r"registered by first 2\.1 and second 2\.1: uninstall one"):
        load_plugin(JUDGES, "same")


def test_a_command_that_cannot_be_imported_leaves_the_others_usable(tmp_path: Path) -> None:
    register(tmp_path, "broken", "[ratchet.evaluations]\nodd = no_such_module:odd\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}

    def ratchet(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    shown, failed = ratchet("eval", "--help"), ratchet("eval", "odd", "--limit", "3")
    assert shown.returncode == 0
    assert failed.returncode == 1
    assert "ratchet.evaluations" in failed.stderr
    assert "broken 2.1" in failed.stderr


@pytest.mark.parametrize(("words", "folder"), [(("eval", "bfcl"), "bfcl"), (("tune", "lessons"), "lessons")])
def test_a_command_of_a_plugin_that_is_not_installed_names_its_distribution(
    tmp_path: Path, words: tuple[str, ...], folder: str
) -> None:
    command = [sys.executable, "-S", "-m", "ratchet", *words, "--help"]
    environ = environment_without_plugins(tmp_path)
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    failed = subprocess.run(command[:-1], env=environ, capture_output=True, text=True, check=False)
    for text in (" ".join(shown.stdout.split()), failed.stderr):
        assert f"install ratchet-rl-{folder}, from a clone of Ratchet: pip install ./plugins/{folder}" in text
    assert failed.returncode == 1
