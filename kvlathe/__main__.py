"""``python -m kvlathe`` is ``kvlathe``."""

from kvlathe.cli.main import main

if __name__ == "__main__":
    main()
