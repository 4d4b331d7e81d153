"""tests/harness/clients."""
