"""store/access."""
