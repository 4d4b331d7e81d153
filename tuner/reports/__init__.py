"""Results, and the report of all methods."""
