"""Prompt tuning and lessons."""
