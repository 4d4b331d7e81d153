"""Series of versions of known quality, and what different release policies make of them."""
