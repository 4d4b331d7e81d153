"""Collecting: sealed trajectories to ready groups, resamples and drops."""
