#!/usr/bin/env bash
# Makes .clients (or the folder named): LangChain's ChatOpenAI, pydantic-ai, OpenAI's agents and Anthropic's client,
# which tests run against the server.
# Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
begin "${1:-.clients}" "LangChain's, pydantic-ai's, OpenAI's and Anthropic's clients" scripts/clients_env.sh
install langchain-openai==1.7.3 'pydantic-ai-slim[openai]==2.68.0' openai-agents==0.24.0 anthropic==2.14.0
finish agents anthropic langchain_openai pydantic_ai.models.openai
