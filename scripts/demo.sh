#!/usr/bin/env bash
# Sets up what it needs and is missing, then runs the main job on the shipped model: build, generate, evaluate, one table.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --demo
exec .venv/bin/python scripts/demo.py "$@"
