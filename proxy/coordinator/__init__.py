"""The coordinator: linking, versions, keys and limits, shipping, the operator API, the console, health."""
