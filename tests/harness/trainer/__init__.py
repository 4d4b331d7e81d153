"""tests/harness/trainer."""
