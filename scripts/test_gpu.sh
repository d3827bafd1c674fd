#!/bin/sh
# The tests that need a GPU: one build of the library for it, then all of them.
#   scripts/test_gpu.sh [PROCESSES]
# Needs nvcc, and torch that sees the GPU. What has no library here (TensorRT, say) is skipped with its reason.
set -eu
cd "$(dirname "$0")/.."
python3 -m kvlathe native --cuda-architectures native
export KVLATHE_LIBRARY="$PWD/build/native/libkvlathe.so"
# Processes beside one another would take every core each for their references.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python3 -m pytest -q -rfEs -n "${1:-8}" tests/native tests/export/model/test_device.py
