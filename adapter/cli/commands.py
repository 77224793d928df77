"""Lists the commands: what each does, examples of its use, and the module with its code.

Such a module has `COMMANDS`. For the name of a command it holds the function that adds the options
to a parser, and the one that runs the command and returns the exit code.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Describes one command for the parser and for --help."""

    summary: str
    module: str
    examples: tuple[str, ...]
    arguments: str = ""  # arguments without a flag, as the usage shows them
    notes: str = ""  # the end of the help


GROUPS: Mapping[str, Mapping[str, Command]] = {
    "serve": {
        "serve": Command(
            "run the adapter",
            "adapter.cli.serve",
            (
                "triton-adapter serve --triton-grpc=triton:8001 --model-roots=/opt/ml/models",
                "triton-adapter serve --triton=embedded --memory-limit=8GiB --examples",
                "ADAPTER_HTTP=unix:/run/adapter.sock triton-adapter serve --config adapter.yaml",
            ),
        ),
    },
    "models of a running adapter": {
        "list": Command(
            "list the models that may be called: in memory, on disk and in the stores",
            "adapter.cli.store_models",
            (
                "triton-adapter list",
                "triton-adapter list 'team-a/*' --all",
                "triton-adapter list digits --json | jq -r .name",
            ),
            arguments="[FILTER]",
            notes=(
                "A store is read page by page. `list` begins with the first models by name, and "
                "says at its end\nhow to go on. Folders and files that do not look like a model "
                "are left out, and may be called all\nthe same."
            ),
        ),
        "show": Command(
            "show all that is known of one model, and a line that calls it",
            "adapter.cli.store_models",
            (
                "triton-adapter show digits",
                "triton-adapter show team-a/fraud.tar.gz --json",
            ),
            arguments="NAME",
        ),
        "ps": Command(
            "list the devices and the models of a running adapter, with their memory",
            "adapter.cli.models",
            (
                "triton-adapter ps",
                "triton-adapter ps digits --watch",
                "triton-adapter ps --json --url=http://10.0.0.7:8081",
            ),
            arguments="[NAME...]",
        ),
        "load": Command(
            "load a model",
            "adapter.cli.models",
            (
                "triton-adapter load digits examples/models/digits",
                "triton-adapter load fraud /models/fraud.tar.gz --model-type=onnx",
            ),
            arguments="NAME SOURCE",
        ),
        "unload": Command(
            "unload one or several models",
            "adapter.cli.models",
            ("triton-adapter unload digits", "triton-adapter unload digits fraud --json"),
            arguments="NAME...",
        ),
    },
    "sizes of a running adapter": {
        "forget": Command(
            "forget what was learned of a model: its size, and that it did not fit",
            "adapter.cli.models",
            (
                "triton-adapter forget fraud",
                "triton-adapter forget team-a/fraud.tar.gz --admin=unix:/run/adapter-admin.sock",
            ),
            arguments="NAME",
            notes=(
                "The adapter measures a package when it loads it, and remembers the size. It "
                "refuses what ran out of\nmemory with nothing else loaded. After this command the "
                "next load is tried anew, with a size that\nis declared or guessed from the "
                "files. Use it when a figure is wrong for good: when a neighbour of\nthe GPU has "
                "gone, or a load took more than it should.\n\nA loaded model stays loaded, and "
                "is booked with the same size until its next load."
            ),
        ),
    },
    "health of a running adapter": {
        "wait": Command(
            "block until the adapter is ready",
            "adapter.cli.probes",
            (
                "triton-adapter wait --timeout=60",
                "triton-adapter wait --url=http://127.0.0.1:8081/startup",
            ),
        ),
        "healthcheck": Command(
            "ask once whether the adapter is ready",
            "adapter.cli.probes",
            (
                "triton-adapter healthcheck",
                "triton-adapter healthcheck --url=http://127.0.0.1:8081/livez",
                "triton-adapter healthcheck --admin=unix:/run/adapter-admin.sock",
            ),
        ),
        "drain": Command(
            "refuse new work, and block until all requests in flight are answered",
            "adapter.cli.probes",
            (
                "triton-adapter drain --timeout=25",
                "triton-adapter drain --url=unix:/run/adapter-admin.sock",
            ),
        ),
    },
    "tools": {
        "inspect": Command(
            "check a package: show its staged models, or the reason that a load would be refused",
            "adapter.cli.inspect",
            (
                "triton-adapter inspect examples/models/digits",
                "triton-adapter inspect model.tar.gz --name=fraud-v2",
                "triton-adapter inspect shop --entry=pipeline --json",
                "triton-adapter inspect net.bin --model-type=pytorch --schema=net.json",
            ),
            arguments="PATH",
            notes=(
                "exit codes: 0 it would be staged as shown; 1 the load would be refused; 2 bad "
                "arguments; 3 with\n--strict, there are warnings"
            ),
        ),
        "check-config": Command(
            "print every setting, its value and where it came from",
            "adapter.cli.about",
            (
                "triton-adapter check-config --config adapter.yaml",
                "ADAPTER_TRITON=embedded triton-adapter check-config --memory-limit=8GiB --json",
            ),
        ),
        "schema": Command(
            "print the JSON schema of a file of settings, for an editor",
            "adapter.cli.about",
            (
                "triton-adapter schema > settings.schema.json",
                "triton-adapter schema | jq .properties.memory_limit",
            ),
        ),
        "completion": Command(
            "print a shell script that completes commands and flags",
            "adapter.cli.about",
            (
                'eval "$(triton-adapter completion bash)"',
                "triton-adapter completion zsh > ~/.zfunc/_triton-adapter",
            ),
            arguments="SHELL",
        ),
        "version": Command(
            "print the version",
            "adapter.cli.about",
            ("triton-adapter version", "triton-adapter version --all"),
        ),
        "help": Command(
            "print the help of a command",
            "adapter.cli.about",
            ("triton-adapter help", "triton-adapter help serve"),
            arguments="[COMMAND]",
        ),
    },
}
COMMANDS: Mapping[str, Command] = {
    name: command for group in GROUPS.values() for name, command in group.items()
}
# Names that other tools have for a command of ours.
OTHER_WORDS: Mapping[str, str] = {
    "ls": "list",
    "models": "list",
    "describe": "show",
    "status": "ps",
    "memory": "ps",
    "run": "load",
    "add": "load",
    "pull": "load",
    "start": "serve",
    "up": "serve",
    "stop": "unload",
    "rm": "unload",
    "remove": "unload",
    "delete": "unload",
    "health": "healthcheck",
    "config": "check-config",
}
