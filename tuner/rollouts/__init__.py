"""Rollouts: run a workflow on tasks through the proxy, and score the results."""
