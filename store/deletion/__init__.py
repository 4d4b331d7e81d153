"""store/deletion."""
