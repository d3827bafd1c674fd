#!/usr/bin/env bash
# Sets up what is missing, then builds the documentation's site into build/site. A link that leads nowhere fails it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
NO_MKDOCS_2_WARNING=1 exec .venv/bin/python -m mkdocs build --strict "$@"
