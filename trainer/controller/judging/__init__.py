"""trainer/controller/judging."""
