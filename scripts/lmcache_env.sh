#!/usr/bin/env bash
# Makes .lmcache (or the folder named): LMCache, kvlathe and kvlathe-lmcache in one environment. Safe to run again.
#   scripts/lmcache_env.sh && .lmcache/bin/kvlathe-lmcache server --help
# Without LMCache's own dependencies: its wheel asks for CUDA and for clients of stores that no test needs.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
NEEDS="numpy<=2.2.6 filelock fsspec jinja2 networkx sympy mpmath markupsafe aiofile aiofiles blake3 aiohttp cryptography httpx httptools msgspec numba nvtx \
opentelemetry-api opentelemetry-sdk prometheus_client<=0.24.1 psutil py-cpuinfo pyyaml pyzmq safetensors sortedcontainers cachetools fastapi uvicorn \
redis requests transformers>=5.4 tokenizers click rich"
linux_only LMCache
begin "${1:-.lmcache}" "torch, LMCache and kvlathe" scripts/lmcache_env.sh integrations/lmcache/pyproject.toml constraints.txt
install_torch
install --no-deps lmcache==0.5.6
read -ra needs <<<"$NEEDS"
install_despite "${needs[@]}" typing_extensions
install --no-deps --editable . --editable integrations/lmcache
finish kvlathe_lmcache.serde
