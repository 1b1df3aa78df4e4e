# Two images: `proxy` (the last stage, and what `docker build .` makes) and `trainer`, for a CPU.
#
#     docker build -t tracegrad .
#     docker build -t tracegrad-trainer --target trainer .
#
# Each holds a virtual environment of locked packages, a user that is not root, and no compiler.
# Where a package index of your own is to be used: --build-arg PIP_INDEX_URL=...
ARG PYTHON_IMAGE=python:3.13-slim-trixie

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
WORKDIR /source
COPY requirements/ requirements/
RUN python3 -m venv /tools \
    && /tools/bin/pip install --no-deps --require-hashes -r requirements/tools.txt
COPY pyproject.toml README.md CHANGELOG.md LICENSE NOTICE ./
COPY sdk/ sdk/
COPY trainer/ trainer/
COPY integrations/ integrations/
RUN /tools/bin/python -m hatchling build -t wheel -d /wheels
RUN python3 -m venv /opt/tracegrad

FROM build AS build-trainer
# The CPU build of torch: from where pip is set up to look, else from this index.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN /opt/tracegrad/bin/pip install --no-deps --require-hashes \
        --extra-index-url "${TORCH_INDEX_URL}" -r requirements/torch-cpu.txt \
    && /opt/tracegrad/bin/pip install --no-deps --require-hashes -r requirements/trainer-cpu.txt \
    && /opt/tracegrad/bin/pip install --no-deps --no-index /wheels/*.whl

FROM build AS build-proxy
RUN /opt/tracegrad/bin/pip install --no-deps --require-hashes -r requirements/proxy.txt \
    && /opt/tracegrad/bin/pip install --no-deps --no-index /wheels/*.whl

FROM ${PYTHON_IMAGE} AS base
# A number, so that Kubernetes can see that it is not root.
RUN echo 'tracegrad:x:10001:10001::/data:/usr/sbin/nologin' >>/etc/passwd \
    && echo 'tracegrad:x:10001:' >>/etc/group \
    && mkdir /data /models /state && chown 10001:10001 /data /models /state
ENV PATH=/opt/tracegrad/bin:$PATH PYTHONUNBUFFERED=1 HOME=/data
WORKDIR /data
VOLUME /data
USER 10001:10001

FROM base AS trainer
COPY --from=build-trainer /opt/tracegrad /opt/tracegrad
ENTRYPOINT ["trainer"]
CMD ["--help"]

FROM base AS proxy
COPY --from=build-proxy /opt/tracegrad /opt/tracegrad
EXPOSE 4141
# Beyond loopback the proxy wants an admin key: give TRACEGRAD_API_KEY, and --upstream.
# Another port: give TRACEGRAD_PROXY_PORT, which this sees, and no --port.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s CMD ["python3", "-c", \
    "import os, urllib.request as r; p = os.environ.get('TRACEGRAD_PROXY_PORT', '4141'); r.urlopen(f'http://127.0.0.1:{p}/healthz', timeout=4)"]
ENTRYPOINT ["tracegrad"]
CMD ["proxy", "--host", "0.0.0.0"]
