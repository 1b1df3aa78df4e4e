# vLLM, and the trainer's ranks beside it: vLLM needs this package's plugin to take weights, and the ranks
# need the build of PyTorch that vLLM's image has.
#
#     docker build -f deploy/engine.Dockerfile -t tracegrad-engine:0.1.0 .
#     docker build -f deploy/engine.Dockerfile -t tracegrad-engine-cpu:0.1.0 --target cpu .
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
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

FROM build AS build-cpu
# The CPU build of torch: from where pip is set up to look, else from this index.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/tracegrad \
    && /opt/tracegrad/bin/pip install --no-deps --require-hashes \
        --extra-index-url "${TORCH_INDEX_URL}" -r requirements/torch-cpu.txt \
    && /opt/tracegrad/bin/pip install --no-deps --require-hashes -r requirements/cpu.txt \
    && /opt/tracegrad/bin/pip install --no-deps --require-hashes -r requirements/trainer-cpu.txt \
    && /opt/tracegrad/bin/pip install --no-deps --no-index /wheels/*.whl

FROM ${PYTHON_IMAGE} AS cpu
RUN echo 'tracegrad:x:10001:10001::/data:/usr/sbin/nologin' >>/etc/passwd \
    && echo 'tracegrad:x:10001:' >>/etc/group \
    && mkdir /data /models /state && chown 10001:10001 /data /models /state
COPY --from=build-cpu /opt/tracegrad /opt/tracegrad
COPY deploy/run_ranks.py /usr/local/lib/tracegrad/run_ranks.py
ENV PATH=/opt/tracegrad/bin:$PATH PYTHONUNBUFFERED=1 HOME=/data OMP_NUM_THREADS=1 \
    VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1
WORKDIR /data
USER 10001:10001
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
CMD ["--help"]

FROM ${VLLM_IMAGE} AS gpu
ARG UV_DEFAULT_INDEX
COPY --from=build /wheels /wheels
# No package of vLLM's is replaced: where its versions and ours do not go together, this fails.
RUN uv pip list --system --format=freeze >/tmp/vllm.txt \
    && uv pip install --system --no-cache --constraint /tmp/vllm.txt \
        "tracegrad[trainer,postgres] @ file://$(echo /wheels/*.whl)" \
    && rm -r /tmp/vllm.txt /wheels
RUN echo 'tracegrad:x:10001:10001::/data:/usr/sbin/nologin' >>/etc/passwd \
    && echo 'tracegrad:x:10001:' >>/etc/group \
    && mkdir /data /models /state && chown 10001:10001 /data /models /state
COPY deploy/run_ranks.py /usr/local/lib/tracegrad/run_ranks.py
ENV PYTHONUNBUFFERED=1 HOME=/data
WORKDIR /data
USER 10001:10001
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
CMD ["--help"]
