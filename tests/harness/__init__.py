"""tests/harness."""
