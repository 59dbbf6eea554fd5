"""`python -m toolkit` is `dstk`."""

import sys

try:
    from toolkit.cli.main import main
except KeyboardInterrupt:
    print("error: interrupted; nothing was saved yet.", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    main()
