#!/usr/bin/env bash
# Makes .triton (or the folder named): a real Triton Inference Server with its Python backend, and kvlathe in the environment
# that the backend's models run in. The server is the one in the nvidia-pytriton wheel. Safe to run again.
#   scripts/triton_env.sh && kvlathe triton-repo out/auto out/repository && .triton/serve out/repository
# numpy stays below 2 here: with numpy 2 this server's Python backend sends empty outputs.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
PYTRITON=nvidia-pytriton==0.7.0
[ "$(uname -sm)" = "Linux x86_64" ] ||
    die "no Triton server was set up: $PYTRITON is for Linux on x86-64 only. Use NVIDIA's container (docker/triton.Dockerfile)."
begin "${1:-.triton}" "the server and kvlathe" pyproject.toml constraints.txt scripts/triton_env.sh
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
sed -E '/^(numpy|ml_dtypes)==/d' constraints.txt >"$constraints"
install --constraint "$constraints" 'numpy<2' --editable .
install --no-deps "$PYTRITON"

# The wheel's server finds its backend through a folder that holds the stub of this Python's version.
site=$("$WHERE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$("$WHERE/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
stub=$site/pytriton/tritonserver/python_backend_stubs/$version/triton_python_backend_stub
[ -x "$stub" ] || die "no Triton server was set up: $PYTRITON has no stub for Python $version. Set PYTHON to 3.11 to 3.13."
backend=$WHERE/backends/python
rm -rf "$backend"
mkdir -p "$backend"
cp -r "$site"/pytriton/tritonserver/backends/python/. "$backend"
ln -s "$stub" "$backend"
libraries=$("$WHERE/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
cat >"$WHERE/serve" <<SERVE
#!/bin/sh
# serve REPOSITORY [options of tritonserver]
here=\$(cd "\$(dirname "\$0")" && pwd)
repository=\$1
shift
export PATH="\$here/bin:\$PATH" LD_LIBRARY_PATH="$site/nvidia_pytriton.libs:$libraries"
exec "$site/pytriton/tritonserver/bin/tritonserver" --model-repository="\$repository" \\
    --backend-directory="\$here/backends" --disable-auto-complete-config --allow-gpu-metrics=false "\$@"
SERVE
chmod +x "$WHERE/serve"
finish kvlathe
