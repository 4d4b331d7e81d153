"""The section `learner`: hyperparameters that an agent may override, and what all agents of the learner share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from ratchet.settings.setting_errors import key_tree, readable_errors
from ratchet.trainer.errors import SettingError
from ratchet.trainer.settings.learner_process_settings import LearnerProcessSettings
from ratchet.trainer.settings.learner_settings import LearnerSettings

_SHARED = frozenset(field.name for field in dataclasses.fields(LearnerProcessSettings))
_OWN = frozenset(field.name for field in dataclasses.fields(LearnerSettings))


def learner_keys() -> dict[str, Any]:
    """Return the keys of the section with their types."""
    return key_tree(LearnerSettings) | key_tree(LearnerProcessSettings)


def agent_learner_keys() -> dict[str, Any]:
    """Return the keys that an agent may override: those that not all agents of the learner share."""
    return {key: kind for key, kind in learner_keys().items() if key not in _SHARED}


def parse_learner(
    section: Mapping[str, Any], sources: Mapping[tuple[str, ...], str], path: tuple[str, ...] = ("learner",)
) -> tuple[LearnerSettings, LearnerProcessSettings]:
    """Return the two parts of the section, which the settings name `path`. Raises SettingsError."""
    own = {key: value for key, value in section.items() if key in _OWN}
    shared = {key: value for key, value in section.items() if key in _SHARED}
    with readable_errors(sources, LearnerSettings, *path, also=SettingError):
        return (
            TypeAdapter(LearnerSettings).validate_python(own),
            TypeAdapter(LearnerProcessSettings).validate_python(shared),
        )
