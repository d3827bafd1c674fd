#!/usr/bin/env python3
"""``kvlathe build`` for a checkout: compress a checkpoint's KV cache and write an
engine folder."""

from __future__ import annotations

import sys

from kvlathe.cli.main import main

if __name__ == "__main__":
    main(["build", *sys.argv[1:]])
