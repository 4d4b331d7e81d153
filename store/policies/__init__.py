"""store/policies."""
