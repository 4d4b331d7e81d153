"""store/db."""
