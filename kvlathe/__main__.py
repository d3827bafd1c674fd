"""``python -m kvlathe`` is ``kvlathe``."""

from kvlathe.cli.entry import main

if __name__ == "__main__":
    main()
