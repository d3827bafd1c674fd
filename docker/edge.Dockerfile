# syntax=docker/dockerfile:1
# Jetson Orin (aarch64, sm_87; JetPack 6, TensorRT 10.3), built on one or cross-built:
#   docker build --platform linux/arm64 -f docker/edge.Dockerfile -t kvlathe:edge .
#   docker run --rm --runtime nvidia -p 127.0.0.1:8000:8000 -v "$PWD/out/fdc:/engine:ro" kvlathe:edge
FROM nvcr.io/nvidia/l4t-tensorrt:r10.3.0-devel AS wheel
WORKDIR /src
# kvlathe takes Python 3.11; the base image's own is 3.10. Its release decides the packages' versions.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.11 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir cmake==4.1.2 ninja==1.13.0
ENV PATH=/opt/tools/bin:/usr/local/cuda/bin:$PATH
ENV KVLATHE_CUDA=1 KVLATHE_CUDA_ARCHITECTURES=87 TENSORRT_INCLUDE_DIR=/usr/include/aarch64-linux-gnu
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kvlathe ./kvlathe
COPY export ./export
COPY engines ./engines
COPY runtime ./runtime
COPY plugins_cpp ./plugins_cpp
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
    && python3 -c "import glob, zipfile; zipfile.ZipFile(*glob.glob('/dist/*.whl')).getinfo('kvlathe/libkvlathe_trt.so')"

FROM nvcr.io/nvidia/l4t-tensorrt:r10.3.0-runtime
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /dist /dist
RUN python3.11 -m venv /opt/kvlathe \
    && /opt/kvlathe/bin/pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /dist/*.whl)[serve]" \
    && rm -r /dist /tmp/constraints.txt \
    && useradd --create-home --uid 10001 --groups video kvlathe
ENV PATH=/opt/kvlathe/bin:$PATH
USER 10001
WORKDIR /engine
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kvlathe"]
CMD ["serve", "/engine", "--host", "0.0.0.0", "--port", "8000"]
