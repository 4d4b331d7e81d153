"""Environments of the package `verifiers` (0.4): a taskset as a task set, an episode as a rollout with its reward."""
