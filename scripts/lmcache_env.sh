#!/usr/bin/env bash
# Makes .lmcache (or the folder named): LMCache, kvlathe and kvlathe-lmcache in one environment. Safe to run again.
#   scripts/lmcache_env.sh && .lmcache/bin/kvlathe-lmcache server --help
# Without LMCache's own dependencies: its wheel asks for CUDA and for clients of stores that no test needs.
set -euo pipefail
cd "$(dirname "$0")/.."
WHERE=${1:-.lmcache}
TORCH="torch==2.13.0"
CPU_WHEELS=https://download.pytorch.org/whl/cpu
LMCACHE="lmcache==0.5.6"
NEEDS="numpy<=2.2.6 filelock fsspec jinja2 networkx sympy mpmath markupsafe aiofile aiofiles blake3 aiohttp cryptography httpx httptools msgspec numba nvtx \
opentelemetry-api opentelemetry-sdk prometheus_client<=0.24.1 psutil py-cpuinfo pyyaml pyzmq safetensors sortedcontainers cachetools fastapi uvicorn \
redis requests transformers>=5.4 tokenizers click rich"
STAMP=$WHERE/kvlathe-lmcache

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

wanted=$(cat scripts/lmcache_env.sh integrations/lmcache/pyproject.toml | cksum)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ "$(uname -s)" = "Linux" ] || die "LMCache was not set up: its wheels are for Linux only."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
if ! "$WHERE/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $WHERE with $("$python" --version)"
    rm -rf "$WHERE"
    "$python" -m venv "$WHERE"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# `pip install torch` alone may fetch CUDA packages; without its dependencies it does not.
say "installing torch, LMCache and kvlathe into $WHERE"
"$WHERE/bin/python" -c 'import torch' 2>/dev/null ||
    "$WHERE/bin/python" -m pip install -qq --retries 0 --no-deps --index-url "$CPU_WHEELS" "$TORCH" 2>/dev/null ||
    "$WHERE/bin/python" -m pip install -qq --no-deps "$TORCH"
"$WHERE/bin/python" -m pip install -qq --no-deps "$LMCACHE"
read -ra needs <<<"$NEEDS"
"$WHERE/bin/python" -m pip install -qq "${needs[@]}" typing_extensions 2>&1 | grep -v "requires\|resolver" >&2 || true
"$WHERE/bin/python" -m pip install -qq --no-deps --editable . --editable integrations/lmcache
"$WHERE/bin/python" -c 'import kvlathe_lmcache.serde' || die "LMCache was installed, and cannot be imported."
echo "$wanted" >"$STAMP"
