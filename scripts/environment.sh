# Sourced by scripts that make an environment for another tool beside .venv, from the project's root. They call in this order:
#   begin WHERE TITLE FILE...   leaves the script where nothing that WHERE was made from has changed, else makes WHERE's Python
#   install, install_torch      what the tool needs
#   finish MODULE...            says that WHERE is whole, if it can import these
# shellcheck shell=bash
say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

begin() {
    WHERE=$1 TITLE=$2 STAMP=$1/kvlathe-made
    WANTED=$(cat scripts/environment.sh "${@:3}" | cksum)
    [ "$(cat "$STAMP" 2>/dev/null)" != "$WANTED" ] || exit 0
    local python=.venv/bin/python
    [ -x "$python" ] || python=${PYTHON:-python3}
    if ! "$WHERE/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $WHERE with $("$python" --version)"
        rm -rf "$WHERE"
        "$python" -m venv "$WHERE"
    fi
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    say "installing $TITLE into $WHERE"
}

linux_only() { [ "$(uname -s)" = "Linux" ] || die "$1 was not set up: its wheels are for Linux only."; }

install() { "$WHERE/bin/python" -m pip install -qq "$@"; }

# `pip install torch` alone may fetch CUDA packages; without its dependencies it does not.
install_torch() {
    local torch cpu_wheels=https://download.pytorch.org/whl/cpu
    torch=$(sed -n 's/^torch==/torch==/p' constraints.txt)
    "$WHERE/bin/python" -c 'import torch' 2>/dev/null ||
        install --retries 0 --no-deps --index-url "$cpu_wheels" "$torch" 2>/dev/null || install --no-deps "$torch"
}

# Tools that ask for other versions of what they do not import make pip complain of what is meant so.
install_despite() { install "$@" 2>&1 | grep -v "requires\|resolver" >&2 || true; }

finish() {
    local IFS=,
    "$WHERE/bin/python" -c "import $*" || die "$TITLE: they were installed, and cannot be imported."
    echo "$WANTED" >"$STAMP"
}
