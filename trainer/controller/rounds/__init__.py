"""trainer/controller/rounds."""
