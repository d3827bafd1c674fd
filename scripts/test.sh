#!/usr/bin/env bash
# Sets up what is missing, then runs every check: linter, formatting, types, tests. Arguments go to pytest.
# With --quick each test that is not slow runs once, with its first parameters, and types are not checked.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in
*" --quick "*) quick=1 length="about 4 minutes on two cores" ;;
*) quick='' length="about 15 minutes on two cores; --quick takes about 4" ;;
esac
echo "running every check, once set up: $length" >&2
scripts/setup.sh
[ -n "$quick" ] || scripts/triton_env.sh || echo "going on without a Triton server: the tests that call one are skipped" >&2
case " $* " in *nightly*) scripts/dynamo_env.sh || echo "going on without Dynamo: the tests that start one are skipped" >&2 ;; esac
case " $* " in *nightly*) scripts/clients_env.sh || echo "going on without LangChain, pydantic-ai and OpenAI's agents: their tests are skipped" >&2 ;; esac
workers=${TEST_WORKERS:-$(env -u OMP_NUM_THREADS nproc)} # nproc would count OMP_NUM_THREADS
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 NO_COLOR=1
ruff check .
ruff format --check .
git ls-files 'plugins_cpp/*.'{h,cc,cu,cuh} | xargs clang-format --dry-run -Werror
# One core checks the types while the tests begin: alone, it would leave the others idle.
types=$(mktemp)
if [ -n "$quick" ]; then true; else pyright >"$types" 2>&1; fi &
checking=$!
trap 'kill "$checking" 2>/dev/null || true; cat "$types"; rm -f "$types"' EXIT
failed=0
python -m pytest --dist loadfile -n "$workers" --max-worker-restart 0 --durations=10 "$@" || failed=$?
wait "$checking" || failed=$((failed ? failed : 1))
exit "$failed"
