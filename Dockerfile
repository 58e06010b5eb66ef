# The service on the emulated device (CPU). Build: docker build -t rbln-serve .
# An image for an NPU needs the vendor's packages and driver and is not this one.
FROM python:3.11-slim-bookworm AS build
WORKDIR /app
RUN python -m venv /opt/venv
COPY requirements/torch.txt requirements/cpu.lock requirements/
COPY deploy/scripts deploy/scripts
RUN deploy/scripts/install_locked.sh /opt/venv requirements/torch.txt requirements/cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY deploy/vllm-metadata deploy/vllm-metadata
COPY default_model default_model
COPY rbln_backend rbln_backend
COPY server server
RUN deploy/scripts/install_project.sh /opt/venv \
    && /opt/venv/bin/python -m default_model.build --out /opt/default-model

FROM python:3.11-slim-bookworm
# g++ builds the kernels for the CPU of the machine at the first start; they are kept in the cache volume.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 rbln \
    && install --directory --owner=rbln --group=rbln /cache
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/default-model /opt/default-model
ENV PATH=/opt/venv/bin:$PATH \
    VLLM_CACHE_ROOT=/cache \
    VLLM_NO_USAGE_STATS=1
USER rbln
WORKDIR /home/rbln
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# The service answers probes while it loads; /readyz turns 200 when it can serve.
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
ENTRYPOINT ["rbln-serve", "serve"]
CMD ["/opt/default-model", "--served-model-name", "default-model", "--host", "0.0.0.0"]
