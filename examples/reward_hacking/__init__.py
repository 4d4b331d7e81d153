"""A judge that can be fooled, a policy that learns to fool it, and the gate that holds what comes of it."""
