"""The texts of --help for each command."""

# What each command does, then lines that show how it is used.
COMMANDS = {
    "serve": (
        "run the sidecar",
        "triton-adapter serve --triton-grpc=triton:8001 --model-roots=/opt/ml/models",
        "triton-adapter serve --triton=embedded --triton-args=--log-verbose=1 --memory-limit=8GiB",
        "ADAPTER_HTTP=unix:/run/adapter.sock triton-adapter serve --config adapter.yaml",
    ),
    "demo": (
        "a guided tour on a Triton of its own",
        "triton-adapter demo",
        "triton-adapter demo --log-level=debug",
    ),
    "inspect": (
        "say what a load would make of a package, or what is wrong with it",
        "triton-adapter inspect examples/models/digits",
        "triton-adapter inspect model.tar.gz --name=fraud-v2",
        "triton-adapter inspect shop --entry=pipeline --json",
        "triton-adapter inspect net.bin --model-type=pytorch --schema=net.json",
    ),
    "bench": ("load test any listener of the adapter, or Triton itself",),
    "wait": (
        "block until the sidecar is ready",
        "triton-adapter wait --timeout=60",
        "triton-adapter wait --url=http://127.0.0.1:8081/startup",
    ),
    "healthcheck": (
        "ask once whether the sidecar is ready",
        "triton-adapter healthcheck",
        "triton-adapter healthcheck --url=http://127.0.0.1:8081/livez",
        "triton-adapter healthcheck --url=unix:/run/adapter-admin.sock",
    ),
    "drain": (
        "have the sidecar take no more work, and block until all of it is answered",
        "triton-adapter drain --timeout=25",
        "triton-adapter drain --url=unix:/run/adapter-admin.sock",
    ),
    "check-config": (
        "print every setting, its value and where it came from",
        "triton-adapter check-config --config adapter.yaml",
        "ADAPTER_TRITON=embedded triton-adapter check-config --memory-limit=8GiB --json",
    ),
    "version": ("print the version", "triton-adapter version", "triton-adapter version --all"),
}
