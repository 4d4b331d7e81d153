"""trainer/controller."""
