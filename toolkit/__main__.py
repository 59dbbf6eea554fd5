"""`python -m toolkit` is `dstk`."""

from toolkit.cli.main import main

if __name__ == "__main__":
    main()
