"""tests/harness/cli."""
