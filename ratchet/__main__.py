"""`python -m ratchet` is the `ratchet` command."""

from ratchet.cli import main

if __name__ == "__main__":
    main()
