"""Release: `release.py` takes a version from candidate to live and out again; the others answer its questions."""
