"""store/db/tables."""
