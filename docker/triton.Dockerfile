# syntax=docker/dockerfile:1
# Triton Inference Server with kvlathe in its Python backend; the model repository is mounted, or copied in a stage after this:
#   kvlathe triton-repo out/fdc out/repository --copy
#   docker build -f docker/triton.Dockerfile -t kvlathe:triton .
#   docker run --rm --shm-size 256m -p 127.0.0.1:8000-8002:8000-8002 -v "$PWD/out/repository:/models:ro" kvlathe:triton
FROM nvcr.io/nvidia/tritonserver:25.10-py3 AS wheel
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir --target /opt/tools cmake==4.1.2 ninja==1.13.0
ENV PATH=/opt/tools/bin:$PATH PYTHONPATH=/opt/tools
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kvlathe ./kvlathe
COPY export ./export
COPY engines ./engines
COPY runtime ./runtime
COPY plugins_cpp ./plugins_cpp
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM nvcr.io/nvidia/tritonserver:25.10-py3
ENV PYTHONDONTWRITEBYTECODE=1
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /dist /dist
# numpy 2 is not for every version of Triton's Python backend: docs/triton.md.
RUN sed -i -E '/^(numpy|ml_dtypes)==/d' /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --target /opt/kvlathe --constraint /tmp/constraints.txt 'numpy>=1.26,<2' "$(ls /dist/*.whl)" \
    && rm -r /dist /tmp/constraints.txt \
    && useradd --create-home --uid 10001 kvlathe
ENV PATH=/opt/kvlathe/bin:$PATH PYTHONPATH=/opt/kvlathe
USER 10001
WORKDIR /models
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
CMD ["tritonserver", "--model-repository=/models", "--disable-auto-complete-config"]
