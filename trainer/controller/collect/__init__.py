"""trainer/controller/collect."""
