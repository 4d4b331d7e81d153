"""tests/harness/proxy."""
