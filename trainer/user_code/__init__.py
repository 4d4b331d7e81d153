"""trainer/user_code."""
