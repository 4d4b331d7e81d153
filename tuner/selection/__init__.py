"""Model selection and release evaluations."""
