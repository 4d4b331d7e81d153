"""Prompt tuning."""
