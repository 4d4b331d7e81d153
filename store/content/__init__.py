"""store/content."""
