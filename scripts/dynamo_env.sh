#!/usr/bin/env bash
# Makes .dynamo (or the folder named): NVIDIA Dynamo, NIXL and kvlathe in one environment, for a frontend and workers on this
# machine. Neither a GPU nor etcd nor NATS is needed. Safe to run again.
#   scripts/dynamo_env.sh && .dynamo/bin/python -m kvlathe dynamo out/auto
# Without their dependencies: the wheels ask for Kubernetes clients and simulators that neither worker nor frontend imports.
set -euo pipefail
cd "$(dirname "$0")/.."
WHERE=${1:-.dynamo}
DYNAMO="ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 nixl-cu12==1.5.1"
NEEDS="numpy pydantic uvloop aiohttp certifi msgspec prometheus-client pyzmq tqdm zstandard transformers redis"
STAMP=$WHERE/kvlathe-dynamo

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

wanted=$(cat pyproject.toml constraints.txt scripts/dynamo_env.sh | cksum)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ "$(uname -s)" = "Linux" ] || die "Dynamo was not set up: its wheels are for Linux only."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
if ! "$WHERE/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $WHERE with $("$python" --version)"
    rm -rf "$WHERE"
    "$python" -m venv "$WHERE"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
say "installing Dynamo, NIXL and kvlathe into $WHERE"
"$WHERE/bin/python" -m pip install -qq --constraint constraints.txt --editable .
# shellcheck disable=SC2086
"$WHERE/bin/python" -m pip install -qq --no-deps $DYNAMO
# shellcheck disable=SC2086
"$WHERE/bin/python" -m pip install -qq --constraint constraints.txt $NEEDS
"$WHERE/bin/python" -c 'import dynamo.common.backend, nixl_cu12._api' || die "Dynamo was installed, and cannot be imported."
echo "$wanted" >"$STAMP"
