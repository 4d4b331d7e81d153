"""trainer/controller/judges/audit."""
