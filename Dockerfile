# The server as an image: VARIANT=gpu (the default) carries the compiled kernels, VARIANT=cpu neither them nor CUDA.
#
#   docker build --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse HEAD) --tag dqkv .
#   docker build --build-arg VARIANT=cpu --tag dqkv:cpu .
#
# Behind a mirror or without a network, three options of `docker build` reach every step that installs packages, and
# are no part of the image:
#   --secret id=pip,src=pip.conf       the settings of pip
#   --secret id=ca,src=ca.pem          certificates to trust; pip.conf then says cert = /run/ca.pem
#   --build-context wheels=FOLDER      wheels; pip.conf then says find-links = /run/wheels

# Any image with Python 3.11 or newer as python3, its venv module, and apt.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG VARIANT=gpu
# A folder of the build context with kernels that were built before, so that none is compiled here: build/kernels.
ARG ARTIFACTS=

FROM scratch AS wheels

# ---- what the server needs of others; changes with pyproject.toml and constraints.txt alone
FROM ${BASE_IMAGE} AS dependencies
ARG VARIANT
# Extras of the project: "server ray" for the nodes of a Ray cluster.
ARG EXTRAS=server
# Where builds of torch without CUDA are; the variant cpu asks there too.
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/sh", "-euxc"]
ENV PATH=/opt/dqkv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# hadolint ignore=DL3008
RUN apt-get update; \
    apt-get install --yes --no-install-recommends tini; \
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log; \
    groupadd --gid 10001 dqkv; \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin dqkv
COPY pyproject.toml constraints.txt deploy/image/requirements.py ./
# Of torch, its headers, its tests, protoc and the compiler that it brings for CUDA are left out: nothing is compiled here.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/ca.pem \
    --mount=type=bind,from=wheels,target=/run/wheels \
    python3 requirements.py $EXTRAS > requirements.txt; \
    python3 -m venv /opt/dqkv; \
    if [ "$VARIANT" = cpu ]; then set -- ${CPU_INDEX:+--extra-index-url "$CPU_INDEX"}; else set -- apache-tvm-ffi; fi; \
    pip install -c constraints.txt -r requirements.txt "$@"; \
    pip uninstall --yes triton; \
    torch=$(echo /opt/dqkv/lib/python3*/site-packages/torch); \
    rm -rf "$torch/include" "$torch/test"; \
    find "$torch/bin" -type f ! -name torch_shm_manager -delete

# ---- the project as a wheel
FROM dependencies AS wheel
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/ca.pem \
    --mount=type=bind,from=wheels,target=/run/wheels \
    pip install -c constraints.txt hatchling
COPY README.md LICENSE ./
COPY service service
COPY kernels kernels
RUN pip wheel --no-build-isolation --no-deps --no-index --wheel-dir /wheels .

# ---- the compiler, and what compiled kernels need of it when they run
FROM dependencies AS compiler
# hadolint ignore=DL3008
RUN apt-get update; \
    apt-get install --yes --no-install-recommends gcc libc6-dev; \
    rm -rf /var/lib/apt/lists/*
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca,target=/run/ca.pem \
    --mount=type=bind,from=wheels,target=/run/wheels \
    python3 requirements.py compile > compile.txt; \
    pip install -c constraints.txt -r compile.txt; \
    mkdir /kernels; \
    cp /opt/dqkv/lib/python3*/site-packages/nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so /kernels

# ---- kernels compiled here, without a GPU; changes with the source of the kernels alone
FROM compiler AS kernels-gpu
# Options of `dqkv kernels build`. For one kind of GPU alone: --build-arg KERNELS="--arch 80,90 --target sm_90a".
ARG KERNELS="--arch 80,90,100 --target sm_80,sm_90a,sm_100a"
COPY kernels kernels
COPY service/dqkv/__init__.py service/dqkv/__main__.py service/dqkv/errors.py service/dqkv/problem.py \
     service/dqkv/tensor.py service/dqkv/
COPY service/dqkv/cli/__init__.py service/dqkv/cli/kernels.py service/dqkv/cli/
# hadolint ignore=SC2086
RUN PYTHONPATH=service:kernels python3 -m dqkv kernels build --out built --processes "$(nproc)" $KERNELS; \
    cp built/*.so built/*.json /kernels

# ---- kernels that were built before
FROM compiler AS kernels-gpu-ready
ARG ARTIFACTS
COPY ${ARTIFACTS}/*.so ${ARTIFACTS}/*.json /kernels/

# ---- no kernels
FROM dependencies AS kernels-cpu
RUN mkdir /kernels

FROM kernels-cpu AS kernels-cpu-ready

# hadolint ignore=DL3006
FROM kernels-${VARIANT}${ARTIFACTS:+-ready} AS kernels
RUN chmod -R a+rX /kernels

# ---- what the variants differ in when they run
FROM dependencies AS runtime-cpu
ENV DQKV_GPUS=none

FROM dependencies AS runtime-gpu
# Read by NVIDIA's container runtime.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# ---- the image
# hadolint ignore=DL3006
FROM runtime-${VARIANT}
WORKDIR /opt/dqkv
ARG VARIANT
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dqkv" \
      org.opencontainers.image.description="A server that returns the exact gradients of attention: dQ, dK and dV" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      dqkv.variant="${VARIANT}"
# Copied, not mounted: not every builder notices that what it mounts has changed.
COPY --from=wheel /wheels /build/wheels
RUN pip install --no-cache-dir --no-deps --no-index /build/wheels/*.whl; \
    pip uninstall --yes pip; \
    rm -rf /build
COPY --from=kernels /kernels /opt/dqkv/build/kernels
# For a volume: what `dqkv kernels selftest` notes of a GPU outlives the container there.
RUN install --directory --owner=10001 --group=10001 /opt/dqkv/build/kernels/selftests
# Nothing else is written when it runs: the root can be read-only, with a tmpfs at /tmp.
ENV PYTHONDONTWRITEBYTECODE=1 \
    DQKV_COMPILE=never \
    DQKV_KERNELS=/opt/dqkv/build/kernels \
    DQKV_HOST=0.0.0.0 \
    DQKV_HTTP_HOST=0.0.0.0 \
    DQKV_HTTP_PORT=8080
USER 10001:10001
EXPOSE 50051 50052 8080
# Healthy is ready for work: devices up, not draining, room in the queue.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"DQKV_HTTP_PORT\"]}/readyz', timeout=4)"]
ENTRYPOINT ["tini", "--", "dqkv"]
CMD ["serve"]
