"""Resample re-sampling: further answers to the prompts of single-call trajectories, so that they can be compared."""
