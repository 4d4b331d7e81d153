"""trainer/rows."""
