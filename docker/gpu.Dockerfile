# syntax=docker/dockerfile:1
# Production GPUs (sm_80 to sm_120): TensorRT with the plugin, its session and the CUDA kernels built in.
#   docker build -f docker/gpu.Dockerfile -t kvlathe:gpu .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v "$PWD/out/fdc:/engine:ro" kvlathe:gpu
FROM nvcr.io/nvidia/tensorrt:25.10-py3 AS wheel
WORKDIR /src
RUN python3 -m pip install --no-cache-dir --target /opt/tools cmake==4.1.2 ninja==1.13.0
ENV PATH=/opt/tools/bin:$PATH PYTHONPATH=/opt/tools
# Debian's folder of NvInfer.h, on x86-64 and on arm64 servers alike.
ENV KVLATHE_CUDA=1 KVLATHE_CUDA_ARCHITECTURES="80;86;89;90a;120"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kvlathe ./kvlathe
COPY export ./export
COPY engines ./engines
COPY runtime ./runtime
COPY plugins_cpp ./plugins_cpp
RUN TENSORRT_INCLUDE_DIR="/usr/include/$(uname -m)-linux-gnu" python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist . \
    && python3 -c "import glob, zipfile; zipfile.ZipFile(*glob.glob('/dist/*.whl')).getinfo('kvlathe/libkvlathe_trt.so')"

FROM nvcr.io/nvidia/tensorrt:25.10-py3
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /dist /dist
# Into a folder of its own: the image's Python keeps its packages, and TensorRT's bindings stay visible.
RUN python3 -m pip install --no-cache-dir --target /opt/kvlathe --constraint /tmp/constraints.txt "$(ls /dist/*.whl)[serve,gpu]" \
    && rm -r /dist /tmp/constraints.txt \
    && useradd --create-home --uid 10001 kvlathe
ENV PATH=/opt/kvlathe/bin:$PATH PYTHONPATH=/opt/kvlathe
USER 10001
WORKDIR /engine
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["kvlathe"]
CMD ["serve", "/engine", "--host", "0.0.0.0", "--port", "8000"]
