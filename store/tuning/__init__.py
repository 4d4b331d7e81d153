"""store/tuning."""
