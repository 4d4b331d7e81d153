"""trainer/controller/judges/kinds."""
