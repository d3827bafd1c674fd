#!/usr/bin/env bash
# Makes .dynamo (or the folder named): NVIDIA Dynamo, NIXL and kvlathe in one environment, for a frontend and workers on this
# machine. Neither a GPU nor etcd nor NATS is needed. Safe to run again.
#   scripts/dynamo_env.sh && .dynamo/bin/python -m kvlathe dynamo out/auto
# Without their dependencies: the wheels ask for Kubernetes clients and simulators that neither worker nor frontend imports.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
linux_only Dynamo
begin "${1:-.dynamo}" "Dynamo, NIXL and kvlathe" pyproject.toml constraints.txt scripts/dynamo_env.sh
install --constraint constraints.txt --editable .
install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 nixl-cu12==1.5.1
install --constraint constraints.txt numpy pydantic uvloop aiohttp certifi msgspec prometheus-client pyzmq tqdm zstandard transformers redis
finish dynamo.common.backend nixl_cu12._api
