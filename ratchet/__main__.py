"""`python -m ratchet` is the `ratchet` command. Ctrl-C prints no traceback, even during imports."""

import sys

try:
    from ratchet.cli import main
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    main()
