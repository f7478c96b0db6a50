"""``python -m dsframe``: the same command as ``dsframe``."""

from dsframe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
