"""The operator API under `/api`."""
