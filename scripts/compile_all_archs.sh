#!/usr/bin/env bash
# Compiles the CUDA kernels for each GPU architecture they are written for, one by one, without a GPU; for CI or a nightly job.
#   scripts/compile_all_archs.sh [ARCH ...]      e.g. 75 90a; by default all of plugins_cpp/CMakeLists.txt
# Objects land in build/archs/ARCH and are kept, so only what changed is compiled again. Ends with the number of failures.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvcc >/dev/null || { echo "nvcc is not installed: CUDA kernels cannot be compiled (CUDA toolkit 13)" >&2; exit 127; }
all=$(sed -n 's/^set(KVLATHE_CUDA_ARCHITECTURES "\([^"]*\)".*/\1/p' plugins_cpp/CMakeLists.txt | tr ';' ' ')
known=$(nvcc --list-gpu-arch | sed 's/compute_//')
failed=0
for arch in ${*:-$all}; do
  number=${arch%%[a-z]*} folder=build/archs/$arch
  if ! grep -qx "$number" <<<"$known"; then
    echo "sm_$arch: FAILED, this nvcc knows only: ${known//$'\n'/ }"
    failed=$((failed + 1))
    continue
  fi
  mkdir -p "$folder"
  start=$SECONDS
  if cmake -S plugins_cpp -B "$folder" -DKVLATHE_CUDA=ON -DKVLATHE_CUDA_ARCHITECTURES="$arch" >"$folder/log" 2>&1 &&
    cmake --build "$folder" --target kvlathe_cuda --parallel "${COMPILE_JOBS:-$(nproc)}" >>"$folder/log" 2>&1; then
    echo "sm_$arch: compiled in $((SECONDS - start)) s"
  else
    echo "sm_$arch: FAILED, $folder/log ends:"
    tail -20 "$folder/log"
    failed=$((failed + 1))
  fi
done
exit "$failed"
