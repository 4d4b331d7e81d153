"""store/calls."""
