"""Lessons from failed rollouts."""
