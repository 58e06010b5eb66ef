# Images of rbln-serve; see docs/containers.md.
#   make image                                                     the emulated device (CPU)
#   docker build -t rbln-serve:npu --target npu \
#       --secret id=pip.conf,src=$HOME/.config/rbln/pip.conf .     RBLN NPUs
# Every step is a script of deploy/scripts, which tests run, too.

# Tag and digest: the digest decides, the tag is for readers.
ARG BASE=python:3.11.16-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b

FROM ${BASE} AS build
WORKDIR /src
COPY deploy/scripts deploy/scripts
RUN ["deploy/scripts/install_packages.sh", "g++"]
COPY requirements/torch.txt requirements/cpu.lock requirements/
RUN ["deploy/scripts/make_venv.sh", "/opt/venv", "requirements/torch.txt", "requirements/cpu.lock"]
COPY pyproject.toml README.md LICENSE ./
COPY deploy/vllm-metadata deploy/vllm-metadata
COPY default_model/checkpoint default_model/checkpoint
COPY rbln_backend rbln_backend
COPY server server
RUN ["deploy/scripts/build_payload.sh", "/opt/venv", "/opt/default-model", "/opt/bundle"]

FROM ${BASE} AS runtime
COPY deploy/scripts /opt/rbln-serve/
# tini is process 1: it forwards signals and reaps orphans of the server's processes.
RUN /opt/rbln-serve/install_packages.sh tini && /opt/rbln-serve/prepare_runtime.sh
# Nothing is fetched or reported at start, or written outside the volumes and /tmp. USER and LOGNAME
# replace the entry in /etc/passwd that an arbitrary user id lacks.
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
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
    CMD ["/opt/venv/bin/python", "-IS", "/opt/rbln-serve/container_health.py"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/rbln-serve/container_start.sh"]
CMD ["/opt/default-model", "--served-model-name", "default-model"]
ARG BASE
ARG VERSION=0.2.0
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

FROM build AS build-emulated
RUN ["deploy/scripts/trim_venv.sh", "/opt/venv"]
# Bill of materials, including Debian's packages of the base stage.
COPY --from=runtime /var/lib/dpkg/status /src/dpkg-status
RUN ["deploy/scripts/write_sbom.sh", "/opt/venv", "/opt/sbom.cdx.json", "/src/dpkg-status"]

FROM build AS build-npu
# A pip.conf with the vendor's index and the account's credentials; mounted for this step only.
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf,required=true \
    deploy/scripts/install_sdk.sh /opt/venv /run/secrets/pip.conf
COPY --from=runtime /var/lib/dpkg/status /src/dpkg-status
RUN ["deploy/scripts/write_sbom.sh", "/opt/venv", "/opt/sbom.cdx.json", "/src/dpkg-status"]

FROM runtime AS npu
COPY --from=build-npu /opt/venv /opt/venv
COPY --from=build-npu /opt/bundle /opt/bundle
COPY --from=build-npu /opt/default-model /opt/default-model
COPY --from=build-npu /opt/sbom.cdx.json /opt/sbom.cdx.json
LABEL org.opencontainers.image.description="OpenAI-compatible service on RBLN NPUs"

FROM runtime AS emulated
COPY --from=build-emulated /opt/venv /opt/venv
COPY --from=build-emulated /opt/bundle /opt/bundle
COPY --from=build-emulated /opt/default-model /opt/default-model
COPY --from=build-emulated /opt/sbom.cdx.json /opt/sbom.cdx.json
LABEL org.opencontainers.image.description="OpenAI-compatible service on the CPU emulation of RBLN NPUs"
