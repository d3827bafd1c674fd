#!/usr/bin/env bash
# Makes .venv with everything that builds, runs and tests engines, from nothing but Python >= 3.11. Safe to run again.
# With --demo it installs what builds, runs and serves engines, and no tools of development; a later run without it
# installs the rest.
# A machine without CUDA never downloads CUDA packages: pip is asked first which torch it would install.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=$(sed -n 's/^torch==/torch==/p' constraints.txt)
CPU_WHEELS=https://download.pytorch.org/whl/cpu
case "${1:-}" in
--demo) extras=export,serve STAMP=.venv/kvlathe-demo needs="1.4 GB of packages, a few minutes, most of them for the network" ;;
'') extras=export,eval,serve,dev,triton,bench,docs STAMP=.venv/kvlathe-setup needs="2.3 GB of packages, several minutes, most of them for the network" ;;
*) printf 'usage: scripts/setup.sh [--demo]\n' >&2; exit 2 ;;
esac
ALL=.venv/kvlathe-setup # what everything writes is enough for the demo, too
NATIVE=.venv/kvlathe-setup-native

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
step() { say "[$1 of 4, after $SECONDS s] $2"; }

# A terminal sees what is fetched, with a bar; a log has the lines of the steps.
fetch() {
    local quiet=-qq
    [ -t 2 ] && quiet=
    .venv/bin/python -m pip install $quiet "$@" >&2
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 was found: neither python3 nor python3.11 to 3.14 is one. Install it, or set PYTHON."
}

# Debian and Ubuntu ship Python without ensurepip; the package that holds it is named after the version.
ensure_venv_works() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    local package
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    command -v apt-get >/dev/null && [ "$(id -u)" = 0 ] ||
        die "$1 cannot make virtual environments: ensurepip is missing. Run 'sudo apt-get install $package'."
    say "installing $package"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >&2 </dev/null
}

# Prints 'cuda' or 'cpu': the build that a plain 'pip install torch' would fetch here, read from its requirements.
torch_build() {
    .venv/bin/python -m pip install -qq --dry-run --no-deps --ignore-installed --report - "$TORCH" |
        .venv/bin/python -c '
import json, re, sys
needs = json.load(sys.stdin)["install"][0]["metadata"].get("requires_dist", [])
print("cuda" if any(re.match(r"(nvidia|cuda|triton)", need) for need in needs) else "cpu")'
}

install_torch() {
    local build
    .venv/bin/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != sys.argv[1])' "${TORCH#torch==}" 2>/dev/null && return
    build=$(torch_build || echo unknown)
    if [ "$build" = cpu ]; then
        fetch --no-deps "$TORCH"
    else
        fetch --no-deps --index-url "$CPU_WHEELS" "$TORCH" ||
            die "torch was not installed: $CPU_WHEELS cannot be reached. Install a CPU build of $TORCH into .venv, then run this again."
    fi
}

# Kernels of an earlier checkout cannot read what today's engines hold, so they are built again where a source changed.
build_kernels() {
    local sources
    sources=$(find plugins_cpp -type f -print0 | sort -z | xargs -0 cat | cksum)
    [ "$(cat "$NATIVE" 2>/dev/null)" = "$sources" ] && return
    step 4 "building the native kernels, about a minute on two cores"
    if .venv/bin/kvlathe native >/dev/null; then
        echo "$sources" >"$NATIVE"
    else
        say "going on without native kernels: engines run their ONNX functions, which is slower"
    fi
}

wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)
for stamp in "$STAMP" "$ALL"; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        build_kernels
        exit 0
    fi
done
say "setting up .venv: $needs"
python=$(find_python)
ensure_venv_works "$python"
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    step 1 "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
step 2 "installing torch in its CPU build"
.venv/bin/python -m pip install -qq 'pip>=23'
install_torch
step 3 "installing kvlathe[$extras]"
fetch --constraint constraints.txt --editable ".[$extras]"
if .venv/bin/python -m pip list --format freeze | grep -q '^nvidia-'; then
    die "CUDA packages were installed: a package index answered with them. Remove .venv and report this."
fi
build_kernels
echo "$wanted" >"$STAMP"
say "set up in $SECONDS s"
