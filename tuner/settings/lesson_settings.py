"""The settings of lessons from failures, section `tuner.lessons` of ratchet.yaml."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LessonSettings(BaseModel):
    """Which failures are read, how many lessons they make, and how these are tried."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    below: float = Field(0.5, description="attempts at a task failed where their mean score is below this")
    least: int = Field(3, ge=1, description="failed tasks of a family that make lessons worth asking for")
    newest: int = Field(2000, ge=1, description="newest scores that are looked at")
    examples: int = Field(6, ge=1, le=50, description="failed attempts that the reflection model is shown, by family")
    most: int = Field(5, ge=1, le=20, description="lessons of a family")
    longest: int = Field(300, ge=20, le=2000, description="characters of a lesson")
    share: float = Field(0.5, gt=0, lt=1, description="share of new trajectories that get the lessons on trial")
