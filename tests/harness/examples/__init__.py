"""tests/harness/examples."""
