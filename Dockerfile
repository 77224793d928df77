# The images: docs/images.md says what each has and how to build them.
#   adapter      the sidecar, for a Triton in another container
#   sagemaker    the sidecar and Triton in one, as SageMaker runs containers
#   triton-cpu   a small Triton with the python backend alone, to try things out without a GPU
# Needs BuildKit. `--secret id=ca,src=FILE`: certificates to trust while packages are fetched.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:25.08-py3

# The adapter as a wheel, and a pip to take along to images that may have none.
FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    python3 -m venv /build && mkdir /pip && cp -r /build/lib/python3*/site-packages/pip /pip/ \
    && /build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /requirements/build.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY adapter adapter
COPY bench bench
COPY examples/models examples/models
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

# What the adapter needs, in a folder of its own that a stage with the same Python can take whole.
FROM ${PYTHON_IMAGE} AS packages
ARG PIP_INDEX_URL
ENV PYTHONPATH=/pip
COPY --from=wheel /pip /pip
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    python3 -m venv --without-pip /opt/adapter && /opt/adapter/bin/python -m pip install \
      --no-cache-dir --no-deps --require-hashes -r /requirements/adapter.txt
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    /opt/adapter/bin/python -m pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM ${PYTHON_IMAGE} AS adapter
# No pip and no program that gives privileges in the image. The folders are where packages and Triton's repository are mounted by
# default; a new volume takes its owner and mode from them, and any user may have to write there.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
      /usr/local/lib/python3*/ensurepip /usr/lib/python3*/ensurepip /usr/share/python-wheels \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
    && install -d /opt/ml/models && install -d -m 1777 /models /models/_triton_models
COPY --from=packages /opt/adapter /opt/adapter
ENV PATH=/opt/adapter/bin:$PATH
USER 65532:65532
EXPOSE 8080 8081 8085
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=150s --start-interval=1s \
  CMD ["triton-adapter", "healthcheck"]
ENTRYPOINT ["triton-adapter"]
CMD ["serve"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="triton-adapter" \
      org.opencontainers.image.description="SageMaker multi-model and ModelMesh contracts in front of a stock NVIDIA Triton" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# The same once more, with the Python of Triton's image.
FROM ${TRITON_IMAGE} AS sagemaker-packages
ARG PIP_INDEX_URL
# hadolint ignore=DL3002
USER 0:0
ENV PYTHONPATH=/pip
COPY --from=wheel /pip /pip
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    python3 -m venv --without-pip /opt/adapter && /opt/adapter/bin/python -m pip install \
      --no-cache-dir --no-deps --require-hashes -r /requirements/adapter.txt
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    /opt/adapter/bin/python -m pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

# What starts first in Triton's image (drivers are looked for there) goes on doing so, and is
# given `serve`, as SageMaker says it.
FROM ${TRITON_IMAGE} AS sagemaker
COPY --from=sagemaker-packages /opt/adapter /opt/adapter
COPY --chmod=755 deploy/images/serve /usr/local/bin/
# last on PATH: the python backend takes the first python3 there for the models
ENV PATH=$PATH:/opt/adapter/bin \
    ADAPTER_TRITON=embedded \
    SAGEMAKER_MULTI_MODEL=false \
    SAGEMAKER_TRITON_ALLOW_GRPC=false \
    SAGEMAKER_TRITON_ALLOW_METRICS=false
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=150s --start-interval=1s \
  CMD ["triton-adapter", "healthcheck"]
CMD ["serve"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL com.amazonaws.sagemaker.capabilities.multi-models="true" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      org.opencontainers.image.title="triton-adapter-sagemaker" \
      org.opencontainers.image.description="SageMaker's multi-model contract and a stock NVIDIA Triton in one container" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# Laid out as NVIDIA's images are, as far as it goes: /opt/tritonserver, tritonserver on PATH.
FROM ${PYTHON_IMAGE} AS triton-cpu
ARG PIP_INDEX_URL
WORKDIR /opt/tritonserver
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    python3 -m venv python \
    && python/bin/pip install --no-cache-dir --no-deps --require-hashes -r /requirements/triton-cpu.txt \
    && python/bin/pip uninstall --yes pip setuptools \
    && ln -s python/lib/python3*/site-packages/nvidia_pytriton.libs lib \
    && ln -s python/lib/python3*/site-packages/pytriton/tritonserver/bin bin \
    && mkdir -p backends && mv bin/../backends/python backends/ \
    && version="$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
    && mv "bin/../python_backend_stubs/$version/triton_python_backend_stub" backends/python/ \
    && rm -rf bin/../python_backend_stubs \
    && chmod +x bin/tritonserver backends/python/triton_python_backend_stub
COPY --chmod=755 deploy/images/tritonserver /usr/local/bin/
USER 65532:65532
EXPOSE 8000 8001 8002
LABEL org.opencontainers.image.title="triton-cpu" \
      org.opencontainers.image.description="tritonserver of the PyPI package nvidia-pytriton, python backend only"
