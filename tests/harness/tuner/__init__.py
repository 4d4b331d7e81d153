"""tests/harness/tuner."""
