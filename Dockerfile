# Images of rbln-serve; see docs/containers.md.
#   make image                                                     the emulated device (CPU)
#   docker build -t rbln-serve:npu --target npu \
#       --secret id=pip.conf,src=$HOME/.config/rbln/pip.conf .     RBLN NPUs
#
# What changes rarely comes first, and each stage copies only what its step reads: a change of a line of
# this project repeats one step, and replaces the layer of /opt/rbln-serve, not that of its packages.
# Debian's packages have no versions here: its archive keeps the newest only (hadolint's DL3008).
# Installed files get one date, so that the same files make the same layer whenever they are installed.

# Tag and digest: the digest decides, the tag is for readers.
ARG BASE=python:3.11.16-slim-trixie@sha256:be1575ed968de893bd54f4c56315ff7c4736ce522c1bca08fd521731aafc0d76

FROM ${BASE} AS packages
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install --yes -q --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY deploy/scripts/install.sh deploy/scripts/
COPY requirements/torch.txt requirements/cpu.lock requirements/
# An image keeps no downloads, and its files never change: byte code need not be compared with them.
# The environment's Python imports what is below /opt/rbln-serve, too.
RUN PIP_NO_CACHE_DIR=1 INVALIDATION=unchecked-hash \
    deploy/scripts/install.sh /opt/venv requirements/torch.txt requirements/cpu.lock && \
    echo /opt/rbln-serve/lib/python3.11/site-packages >/opt/venv/lib/python3.11/site-packages/rbln-serve.pth

FROM packages AS kernels
COPY rbln_backend/__init__.py rbln_backend/errors.py rbln_backend/
COPY rbln_backend/host rbln_backend/host
COPY rbln_backend/graphs/__init__.py rbln_backend/graphs/cache.py rbln_backend/graphs/kernel_files.py rbln_backend/graphs/
COPY rbln_backend/devices/__init__.py rbln_backend/devices/
COPY rbln_backend/devices/emulated rbln_backend/devices/emulated
# CPUs without AVX2 run PyTorch's operators.
RUN /opt/venv/bin/python -m rbln_backend.devices.emulated.build --into /opt/bundle --variants avx512_bf16 avx512 avx2 && \
    find /opt/bundle -exec touch --no-dereference --date=@0 {} +

FROM packages AS project
COPY pyproject.toml README.md LICENSE ./
COPY deploy/vllm-metadata deploy/vllm-metadata
COPY default_model/checkpoint default_model/checkpoint
COPY rbln_backend rbln_backend
COPY server server
RUN /opt/venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --no-build-isolation \
        --no-index --ignore-installed --prefix /opt/rbln-serve ./deploy/vllm-metadata . && \
    ln -s /opt/container/container_start.sh /opt/rbln-serve/bin/vllm && \
    mv /opt/rbln-serve/share/rbln-serve/default-model /opt/default-model && \
    rm -r /opt/rbln-serve/share && \
    /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/rbln-serve/lib && \
    find /opt/rbln-serve /opt/default-model -exec touch --no-dereference --date=@0 {} +

FROM ${BASE} AS runtime
# tini is process 1: it forwards signals and reaps orphans of the server's processes. What a container may
# write to belongs to group 0 with the owner's permissions, as do files that are created there, so a
# container runs under any user id whose group is 0.
# hadolint ignore=DL3008
RUN apt-get update -q && apt-get install --yes -q --no-install-recommends tini && \
    rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log && \
    echo "rbln:x:10001:0:rbln-serve:/home/rbln:/usr/sbin/nologin" >>/etc/passwd && \
    for folder in /home/rbln /cache /models /adapters /data; do \
        mkdir -p "$folder" && chown 10001:0 "$folder" && chmod 2775 "$folder" || exit 1; \
    done
COPY deploy/scripts/container_start.sh deploy/scripts/container_health.py /opt/container/
# Nothing is fetched or reported at start, or written outside the volumes and /tmp. USER and LOGNAME
# replace the entry in /etc/passwd that an arbitrary user id lacks.
ENV PATH=/opt/rbln-serve/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/rbln \
    USER=rbln \
    LOGNAME=rbln \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_CACHE_ROOT=/cache \
    VLLM_RBLN_CACHE_BUNDLES=/opt/bundle \
    HF_HOME=/models \
    HF_HUB_OFFLINE=1 \
    HF_MODULES_CACHE=/tmp/hf-modules \
    XDG_CACHE_HOME=/tmp/.cache \
    XDG_CONFIG_HOME=/tmp/.config \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1
WORKDIR /home/rbln
USER 10001:0
VOLUME ["/models", "/cache", "/adapters", "/data"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# Ready means that every graph is compiled, which may take an hour on an NPU with an empty cache; a
# server that cannot start or hangs exits long before.
HEALTHCHECK --interval=10s --timeout=5s --start-period=2h --retries=3 \
    CMD ["/opt/venv/bin/python", "-IS", "/opt/container/container_health.py"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/container/container_start.sh"]
CMD ["/opt/default-model", "--served-model-name", "default-model"]

FROM packages AS packages-emulated
COPY deploy/scripts/trim_image.sh deploy/scripts/
RUN ["deploy/scripts/trim_image.sh", "/opt/venv"]

FROM packages AS packages-npu
COPY pyproject.toml ./
COPY deploy/scripts/install_sdk.sh deploy/scripts/
# A pip.conf with the vendor's index and the account's credentials; mounted for this step only.
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf,required=true \
    deploy/scripts/install_sdk.sh /opt/venv /run/secrets/pip.conf

FROM runtime AS npu
COPY --from=packages-npu /opt/venv /opt/venv
COPY --from=kernels /opt/bundle /opt/bundle
COPY --from=project /opt/default-model /opt/default-model
COPY --from=project /opt/rbln-serve /opt/rbln-serve
LABEL org.opencontainers.image.description="OpenAI-compatible service on RBLN NPUs"
ARG BASE
ARG VERSION=0.3.0
# Set by the builder (`make image` sets the first two); empty by default.
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="rbln-serve" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}"

FROM runtime AS emulated
COPY --from=packages-emulated /opt/venv /opt/venv
COPY --from=kernels /opt/bundle /opt/bundle
COPY --from=project /opt/default-model /opt/default-model
COPY --from=project /opt/rbln-serve /opt/rbln-serve
LABEL org.opencontainers.image.description="OpenAI-compatible service on the CPU emulation of RBLN NPUs"
ARG BASE
ARG VERSION=0.3.0
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="rbln-serve" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}"
