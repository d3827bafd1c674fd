#!/usr/bin/env bash
# Makes .clients (or the folder named): LangChain's ChatOpenAI, pydantic-ai, OpenAI's agents and Anthropic's client,
# which tests run against the server.
# Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
WHERE=${1:-.clients}
CLIENTS="langchain-openai==1.7.3 pydantic-ai-slim[openai]==2.68.0 openai-agents==0.24.0 anthropic==2.14.0"
STAMP=$WHERE/kvlathe-clients

say() { printf '%s\n' "$*" >&2; }

wanted=$(cksum <scripts/clients_env.sh)
if [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
if ! "$WHERE/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $WHERE with $("$python" --version)"
    rm -rf "$WHERE"
    "$python" -m venv "$WHERE"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
say "installing LangChain's, pydantic-ai's, OpenAI's and Anthropic's clients into $WHERE"
# shellcheck disable=SC2086
"$WHERE/bin/python" -m pip install -qq $CLIENTS
"$WHERE/bin/python" -c 'import agents, anthropic, langchain_openai, pydantic_ai.models.openai'
echo "$wanted" >"$STAMP"
