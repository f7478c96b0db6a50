"""``python -m dsframe_check``: the same as ``dsframe-check``."""

from dsframe_check import main

if __name__ == "__main__":
    raise SystemExit(main())
