"""Warm start: imitation of good trajectories before (or between) the rounds of reinforcement learning."""
