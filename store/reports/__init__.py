"""Reports from the store: learning, policy movement, undecided versions. For every component that shows them."""
