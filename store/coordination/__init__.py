"""store/coordination."""
