"""Results, the report of all methods, and model cards."""
