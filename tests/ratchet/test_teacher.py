"""The teacher as a project's settings name it, and the check of `ratchet doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.checks.doctor import check_teacher, has_teacher
from ratchet.errors import SettingsError
from ratchet.settings.project_settings import Settings
from ratchet.trainer.settings.judge_specs import RulerSpec, TeacherSpec
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.scripted_teacher import NAME, ScriptedTeacher


def entry(url: str = "http://10.0.0.5:8001", name: str = "teacher", **more: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": f"hosted_vllm/{NAME}", "api_base": url, **more}}


def project(tmp_path: Path, *models: dict[str, Any], **judge: Any) -> Settings:
    return Settings.of(
        {
            "state_dir": tmp_path,
            "base_model": "tiny",
            "model_list": models,
            "trainer": {"judge": {"kind": "teacher", "model": "teacher", **judge}},
            "learner": {"loss_type": "distillation"},
        }
    )


def test_the_teacher_is_looked_up_in_model_list_with_its_key_and_price(tmp_path: Path) -> None:
    listed = entry(api_key="os.environ/TEACHER_KEY", input_cost_per_token=2e-6)
    judge = project(tmp_path, listed, concurrency=3).trainer.judge
    assert judge == TeacherSpec(
        kind="teacher", model=NAME, base_url="http://10.0.0.5:8001/v1", api_key_env="TEACHER_KEY",
        input_cost_per_million=2.0, concurrency=3,
    )  # fmt: skip


def test_a_teacher_with_an_address_needs_no_model_list(tmp_path: Path) -> None:
    judge = project(tmp_path, base_url="http://t:1", api_key_env="K").trainer.judge
    assert isinstance(judge, TeacherSpec)
    assert (judge.model, judge.base_url) == ("teacher", "http://t:1")


def test_an_agent_may_have_a_teacher_of_its_own(tmp_path: Path) -> None:
    own = {"judge": {"kind": "teacher", "model": "teacher"}, "learner": {"loss_type": "distillation"}}
    settings = Settings.of(
        {"state_dir": tmp_path, "base_model": "t", "model_list": [entry()], "agents": {"mail": own, "chat": {}},
         "trainer": {"judge": "a:b"}}
    )  # fmt: skip
    kinds = {name: agent.judge.kind for name, agent in settings.agents_by_name.items()}
    assert kinds == {"mail": "teacher", "chat": "function"}


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ([], r"trainer\.judge\.model: the teacher 'teacher' is not in model_list, which has no model: add it there"),
        ([entry(name="other")], "which has other"),
        ([entry(), entry("http://b:1")], "2 entries of the name 'teacher', and a teacher is one server"),
    ],
    ids=["none", "another", "two"],
)
def test_a_teacher_that_is_not_one_model_of_the_list_is_refused(
    models: list[dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=reason):
        project(tmp_path, *models)


def test_a_model_judge_without_a_model_names_model_list_which_needs_no_address(tmp_path: Path) -> None:
    judge = {"kind": "ruler"}
    content = {"state_dir": tmp_path, "base_model": "t", "model_list": [entry()], "trainer": {"judge": judge}}
    reason = r"trainer\.judge\.model: field required: name a model of model_list \(it has teacher\)"
    with pytest.raises(SettingsError, match=reason):
        Settings.of(content)


def test_distillation_without_a_teacher_is_refused(tmp_path: Path) -> None:
    alone = {"state_dir": tmp_path, "base_model": "tiny", "learner": {"loss_type": "distillation"}}
    with pytest.raises(SettingsError, match=r"set trainer\.judge to \{kind: teacher, model: NAME\}"):
        Settings.of(alone | {"trainer": {"judge": "a:b"}})


@pytest.fixture
def servers() -> Iterator[tuple[ScriptedTeacher, ScriptedEngine]]:
    teacher, policy = ScriptedTeacher(), ScriptedEngine(lambda name, ids: 0.0)
    yield teacher, policy
    teacher.close()
    policy.close()


def test_the_doctor_checks_the_teacher(servers: tuple[ScriptedTeacher, ScriptedEngine], tmp_path: Path) -> None:
    teacher, policy = servers
    settings = project(tmp_path, entry(teacher.url))
    assert has_teacher(settings)
    running = {"vllm_url": policy.url}
    passed = check_teacher(settings, running)
    assert (passed.name, passed.passed) == ("teacher", True)
    assert "scores the policy's token ids, up to 63 tokens" in passed.seen
    assert not check_teacher(settings, {}).passed
    teacher.first = 1
    other = check_teacher(settings, running)
    assert not other.passed
    assert "has another tokenizer than base" in other.seen
    teacher.status = 503
    away = check_teacher(settings, running)
    assert not away.passed
    assert "trajectories wait" in (away.remedy or "")


def test_a_second_judge_is_looked_up_in_model_list_too(tmp_path: Path) -> None:
    second = {"second_judge": {"kind": "ruler", "model": "teacher"}}
    settings = Settings.of(
        {"state_dir": tmp_path, "base_model": "t", "model_list": [entry()],
         "trainer": {"judge": "a:b", "sentinel": second, "release": second}}
    )  # fmt: skip
    trainer = settings.trainer
    for found in (trainer.sentinel.second_judge, trainer.release.second_judge):
        assert isinstance(found, RulerSpec)
        assert (found.model, found.base_url) == (NAME, "http://10.0.0.5:8001/v1")
    with pytest.raises(SettingsError, match=r"trainer\.sentinel\.second_judge\.model: the model 'teacher' is not in"):
        settings.changed(model_list=())
