"""store/training."""
