"""Task sets: imported copies, and mixtures of several."""
