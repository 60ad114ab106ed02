# syntax=docker/dockerfile:1
# The picker and the operator: docker build -t thunderagent-epp . && docker run thunderagent-epp epp --help
ARG PYTHON=python:3.13-slim-trixie

FROM ${PYTHON} AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
# Dependencies change less often than the code: they are a layer of their own.
COPY requirements.lock requirements-build.lock ./
RUN python -m venv --without-pip /opt/thunderagent
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip --python /opt/thunderagent/bin/python install --require-hashes --no-deps --only-binary :all: \
      --requirement requirements.lock
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/build && \
    /opt/build/bin/python -m pip install --require-hashes --only-binary :all: --requirement requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY epp epp
COPY operator operator
COPY sim sim
RUN /opt/build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /dist . && \
    python -m pip --python /opt/thunderagent/bin/python install --no-deps --no-index --no-cache-dir /dist/*.whl

FROM ${PYTHON}
LABEL org.opencontainers.image.title="thunderagent-epp" \
      org.opencontainers.image.description="Program-aware endpoint picker for inference gateways, and its operator" \
      org.opencontainers.image.licenses="Apache-2.0"
# Nothing is installed in a container that runs.
RUN python -m pip uninstall --yes pip && \
    rm -rf /usr/local/lib/python3.*/ensurepip
COPY --from=build /opt/thunderagent /opt/thunderagent
COPY docker/healthcheck.py /opt/thunderagent/healthcheck.py
ENV PATH=/opt/thunderagent/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
# Picker: ext_proc, health, pages. Operator: feed, pages.
EXPOSE 9002 9003 9090 9004 9091
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s CMD ["python", "/opt/thunderagent/healthcheck.py"]
ENTRYPOINT ["thunderagent"]
CMD ["--help"]
