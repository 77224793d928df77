"""Where values come from, what is refused, and in which words."""

from pathlib import Path

import pytest

from adapter.errors import InvalidSettings
from adapter.settings import (
    Address,
    Loaded,
    Settings,
    flag_of,
    load_settings,
    parse_address,
)
from tests.cases import rows


def load(flags=None, environ=None, file=None) -> Loaded:
    return load_settings(flags or {}, environ or {}, file)


def problems(flags=None, environ=None, file=None) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        load(flags, environ, file)
    return caught.value.problems


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> Path:
        path = tmp_path / "adapter.yaml"
        path.write_text(text)
        return path

    return write_file


def test_least_time_of_drain_is_part_of_whole():
    assert load({"drain_min_seconds": "18"}).settings.drain_min_seconds == 18
    [problem] = problems({"drain_min_seconds": "5", "drain_timeout_seconds": "4"})
    assert "drain-min-seconds" in problem
    assert "longer than drain_timeout_seconds, 4" in problem


def test_there_are_at_most_55_settings():
    assert len(Settings.model_fields) <= 55


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "listener"),
        [
            ("0.0.0.0:8080", Address("tcp", "0.0.0.0", 8080)),
            ("triton.models.svc:0", Address("tcp", "triton.models.svc", 0)),
            ("[::1]:8080", Address("tcp", "::1", 8080)),
            ("unix:/run/a b.sock", Address("unix", path="/run/a b.sock")),
            ("off", Address("off")),
        ],
    )
    def test_a_listener_reads_and_writes_the_same_text(self, text, listener):
        assert parse_address(text) == listener
        assert str(listener) == text

    @rows(
        "text",
        [
            "",
            "8080",
            ":8080",
            "host:",
            "host:80a",
            "host:-1",
            "host:65536",
            "::1:80",
            "[::1]",
            "[host]:80",
            "unix:relative",
            "host:٣",
            "host:0000080",
            "OFF",
        ],
    )
    def test_anything_else_is_no_listener(self, text):
        with pytest.raises(ValueError, match=r"write HOST:PORT|a port is at most"):
            parse_address(text)


class TestOrder:
    def test_defaults_stand_when_nothing_is_given(self):
        loaded = load()
        assert str(loaded.settings.http) == "127.0.0.1:8080"
        assert loaded.settings.model_roots == (Path("/opt/ml/models"), Path("/models"))
        assert loaded.settings.max_body_bytes == 2**31 - 1
        assert loaded.settings.load_timeout_seconds == 350
        assert set(loaded.origins) == set(Settings.model_fields)
        assert set(loaded.origins.values()) == {"default"}
        assert loaded.warnings == []

    def test_listeners_are_local_unless_listen_host_differs(self):
        def addresses(loaded):
            return [str(getattr(loaded.settings, name)) for name in ("http", "grpc", "admin")]

        assert addresses(load()) == ["127.0.0.1:8080", "127.0.0.1:8085", "127.0.0.1:8081"]
        loaded = load({"listen_host": "0.0.0.0"})
        assert addresses(loaded) == ["0.0.0.0:8080", "0.0.0.0:8085", "0.0.0.0:8081"]
        assert loaded.origins["http"] == "flag --listen-host"
        assert addresses(load({}, {"ADAPTER_LISTEN_HOST": "::"}))[1] == "[::]:8085"

    def test_listeners_address_beats_the_listen_host(self, write):
        environ = {"ADAPTER_LISTEN_HOST": "0.0.0.0", "SAGEMAKER_TRITON_ALLOW_METRICS": "false"}
        loaded = load({}, environ, write("http: 127.0.0.1:9000\n"))
        assert str(loaded.settings.http) == "127.0.0.1:9000"
        assert str(loaded.settings.admin) == "127.0.0.1:8081"
        assert str(loaded.settings.grpc) == "0.0.0.0:8085"

    @pytest.mark.parametrize("host", ["0.0.0.0:8080", "", " ", "a/b", "[::]", "::x"])
    def test_listen_host_is_one_word_without_port(self, host):
        if not host:
            assert str(load({}, {"ADAPTER_LISTEN_HOST": host}).settings.listen_host) == "127.0.0.1"
            return
        with pytest.raises(InvalidSettings) as caught:
            load({"listen_host": host})
        assert caught.value.problems == [
            f"flag --listen-host: {host!r}: write an address or a name, without a port"
        ]

    @rows(
        ("address", "is_open"),
        [
            ("127.0.0.1:1", False),
            ("127.1.2.3:1", False),
            ("[::1]:1", False),
            ("localhost:1", False),
            ("unix:/s", False),
            ("off", False),
            ("0.0.0.0:1", True),
            ("[::]:1", True),
            ("10.0.0.5:1", True),
            ("127.example.com:1", True),
        ],
    )
    def test_only_loopback_and_sockets_are_not_open(self, address, is_open):
        assert parse_address(address).is_open_to_others is is_open

    def test_each_source_beats_the_next(self, write):
        file = write("http: h:3\n")
        flags, environ = {"http": "h:1"}, {"ADAPTER_HTTP": "h:2", "SAGEMAKER_BIND_TO_PORT": "4"}
        inherited = {"SAGEMAKER_BIND_TO_PORT": "4"}
        steps = [
            (load(flags, environ, file), 1, "flag --http"),
            (load({}, environ, file), 2, "environment ADAPTER_HTTP"),
            (load({}, inherited, file), 3, f"file {file}"),
            (load({}, inherited), 4, "SAGEMAKER_BIND_TO_PORT"),
            (load(), 8080, "default"),
        ]
        for loaded, port, origin in steps:
            assert (loaded.settings.http.port, loaded.origins["http"]) == (port, origin)

    def test_none_empty_and_null_count_as_not_given(self, write):
        loaded = load({"http": None}, {"ADAPTER_ADMIN": ""}, write("triton_grpc:\n"))
        assert set(loaded.origins.values()) == {"default"}

    def test_environment_can_name_file_and_flag_beats_it(self, write, tmp_path):
        environ = {"ADAPTER_CONFIG": str(write("log_level: debug\n"))}
        assert load({}, environ).settings.log_level == "debug"
        (other := tmp_path / "other.yaml").write_text("log_level: error\n")
        assert load({}, environ, other).settings.log_level == "error"


class TestInherited:
    @pytest.mark.parametrize(
        ("environ", "value", "origin"),
        [
            ({}, "auto", "default"),
            ({"SAGEMAKER_MULTI_MODEL": "true"}, "forget", "SAGEMAKER_MULTI_MODEL"),
            # a single model has nobody who would load it again
            ({"SAGEMAKER_MULTI_MODEL": "false"}, "auto", "default"),
            ({"RUNTIME_PORT": "8001"}, "forget", "RUNTIME_PORT"),
            ({"LOADTIME_TIMEOUT": "9000"}, "forget", "LOADTIME_TIMEOUT"),
        ],
    )
    def test_reloading_platform_is_known_by_its_variables(self, environ, value, origin):
        loaded = load({}, environ)
        assert loaded.settings.on_triton_restart == value
        assert loaded.origins["on_triton_restart"] == origin

    def test_auto_leaves_restarts_to_the_platform(self):
        platform = {"SAGEMAKER_MULTI_MODEL": "true"}
        auto = load({}, {**platform, "ADAPTER_ON_TRITON_RESTART": "auto"})
        assert auto.settings.on_triton_restart == "forget"
        reload = load({}, {**platform, "ADAPTER_ON_TRITON_RESTART": "reload"})
        assert reload.settings.on_triton_restart == "reload"

    def test_kubernetes_service_variables_are_no_settings(self):
        load(
            {},
            {
                "ADAPTER_PORT": "tcp://10.0.0.1:80",
                "ADAPTER_SERVICE_HOST": "10.0.0.1",
                "ADAPTER_SERVICE_PORT_HTTP": "80",
                "ADAPTER_PORT_80_TCP": "tcp://10.0.0.1:80",
                "ADAPTER_PORT_80_TCP_PROTO": "tcp",
                "ADAPTER_CANARY_PORT": "tcp://10.0.0.2:80",
            },
        )


class TestTypes:
    def test_text_and_yaml_mean_the_same(self, write):
        text = load(
            {},
            {
                "ADAPTER_HTTP": "off",
                "ADAPTER_MEMORY_SOURCE": "off",
                "ADAPTER_TRITON": "embedded",
                "ADAPTER_MODEL_ROOTS": "/a:/b c",
                "ADAPTER_TRITON_ARGS": "--log-verbose 1 --model='a b'",
                "ADAPTER_OOM_PATTERNS": "no room\nfull|brim",
                "ADAPTER_MEMORY_LIMIT": "1.5GiB",
                "ADAPTER_INFER_TIMEOUT_SECONDS": "2.5",
                "ADAPTER_MODEL_STORE": "/store",
                "ADAPTER_ON_DEMAND": "true",
            },
        )
        file = write(
            "http: off\nmemory_source: off\ntriton: embedded\nmodel_roots: [/a, /b c]\n"
            "triton_args: [--log-verbose, 1, '--model=a b']\noom_patterns: [no room, full|brim]\n"
            "memory_limit: 1610612736\ninfer_timeout_seconds: 2.5\n"
            "model_store: /store\non_demand: yes\n"
        )
        assert load({}, {}, file).settings == text.settings
        assert text.settings.http == Address("off")
        assert text.settings.memory_source == "off"
        assert text.settings.triton_args == ("--log-verbose", "1", "--model=a b")
        assert text.settings.memory_limit == 1610612736
        assert text.settings.on_demand is True

    def test_each_repeated_flag_is_one_value(self):
        settings = load({"model_roots": ["/a", "/b"], "triton_args": ["--x=1 2"]}).settings
        assert settings.model_roots == (Path("/a"), Path("/b"))
        assert settings.triton_args == ("--x=1 2",)

    def test_the_examples_are_one_more_model_root(self):
        loaded = load({"model_roots": ["/a"]}).with_root(Path("/examples"))
        assert loaded.settings.all_roots == [Path("/a"), Path("/examples")]

    @pytest.mark.parametrize(
        ("text", "kept"), [("5%", 50), ("0%", 0), ("2.5 %", 25), ("0", 0), ("1KiB", 1024)]
    )
    def test_a_reserve_is_a_share_or_a_size(self, text, kept):
        assert load({"memory_reserve": text}).settings.memory_reserve.compute_bytes(1000) == kept

    def test_the_mode_decides_what_is_left_open(self):
        external, embedded = load().settings, load({"triton": "embedded"}).settings
        assert external.repository == Path("/models/_triton_models")
        assert embedded.repository is None
        assert external.memory_source == embedded.memory_source == "auto"


GOOD_TOKEN = "sesame-sesame-42"  # noqa: S105 - it opens nothing


class TestControlToken:
    def test_token_is_that_of_environment_or_of_file(self, tmp_path):
        file = tmp_path / "token"
        file.write_text(f"\n{GOOD_TOKEN}\n")
        for loaded, origin in (
            (load({}, {"ADAPTER_CONTROL_TOKEN": GOOD_TOKEN}), "environment ADAPTER_CONTROL_TOKEN"),
            (load({}, {"ADAPTER_CONTROL_TOKEN": f"file:{file}"}), f"file {file}"),
        ):
            assert loaded.settings.control_token.get_secret_value() == GOOD_TOKEN
            assert loaded.origins["control_token"] == origin
            assert GOOD_TOKEN not in repr(loaded)

    def test_tcp_callers_need_the_token(self):
        settings = load({}, {"ADAPTER_CONTROL_TOKEN": GOOD_TOKEN}).settings
        assert settings.token_at(parse_address("127.0.0.1:1")) == GOOD_TOKEN
        assert settings.token_at(parse_address("unix:/a")) is None
        assert load().settings.token_at(parse_address("127.0.0.1:1")) is None

    @pytest.mark.parametrize("bad", ["short", "sesame sesame 42", "sesame-sesame-4ü", "=" * 20])
    def test_invalid_token_is_refused_unshown(self, bad, tmp_path):
        file = tmp_path / "token"
        file.write_text(bad)
        for given in ({"ADAPTER_CONTROL_TOKEN": bad}, {"ADAPTER_CONTROL_TOKEN": f"file:{file}"}):
            with pytest.raises(InvalidSettings) as caught:
                load({}, given)
            [problem] = caught.value.problems
            assert "'***': write at least 16 letters, digits" in problem
            assert bad not in f"{problem} {caught.value!r} {caught.value.__cause__}"

    def test_empty_token_file_is_a_problem(self, tmp_path):
        """So is one that is gone: neither means no token."""
        [problem] = problems({}, {"ADAPTER_CONTROL_TOKEN": f"file:{tmp_path}/gone"})
        assert problem.endswith("/gone': No such file or directory")
        (tmp_path / "empty").write_text("\n")
        [problem] = problems({}, {"ADAPTER_CONTROL_TOKEN": f"file:{tmp_path}/empty"})
        assert problem.startswith(f"file {tmp_path}/empty: '***': write at least 16")

    def test_a_file_of_settings_holds_no_token(self, write):
        [problem] = problems(file=write(f"control_token: {GOOD_TOKEN}"))
        assert "no place for a secret: give it as ADAPTER_CONTROL_TOKEN" in problem
        assert GOOD_TOKEN not in problem


class TestProblems:
    def test_all_problems_of_all_sources_come_at_once(self, write):
        file = write("admin: 8081\nlog_levle: info\n")
        environ = {"ADAPTER_HTPP": "1", "ADAPTER_MAX_BODY_BYTES": "-1", "RUNTIME_PORT": "abc"}
        found = problems({"http": "here", "oom_patterns": ["fine", "("]}, environ, file)
        beginnings = [
            f"file {file}, key log_levle: no such setting; did you mean log_level?",
            "environment ADAPTER_HTPP: no such setting; did you mean ADAPTER_HTTP?",
            "flag --http: 'here': write HOST:PORT",
            f"file {file}, key admin: 8081: write HOST:PORT",
            "RUNTIME_PORT: 'abc': write HOST:PORT",
            "flag --oom-patterns: '(': is not a regular expression",
            "environment ADAPTER_MAX_BODY_BYTES: '-1': write bytes or a number with KiB",
        ]
        assert len(found) == len(beginnings)
        for line, beginning in zip(found, beginnings, strict=True):
            assert line.startswith(beginning)

    @rows(
        "flags",
        [
            {"triton_grpc": "127.0.0.1:0"},
            {"triton": "remote"},
            {"memory_limit": "0"},
            {"memory_limit": "lots"},
            {"memory_reserve": "100%"},
            {"load_timeout_seconds": "0"},
            {"load_timeout_seconds": "inf"},
            {"drain_timeout_seconds": "soon"},
            {"inline_files": "perhaps"},
            {"log_level": "INFO"},
            {"allowed_hosts": "http://models.example"},
            {"allowed_hosts": "models.example:8080"},
            {"allowed_hosts": "*"},
            {"no_such_thing": "1"},
        ],
    )
    def test_a_value_outside_its_rule_names_its_flag(self, flags):
        [(name, value)] = flags.items()
        [problem] = problems(flags)
        assert problem.startswith(f"flag {flag_of(name)}: {value!r}: ")

    @pytest.mark.parametrize("text", [":", "/models:", ":/models", "/a::/b"])
    def test_empty_text_is_no_model_root(self, text):
        """It would be the current folder: in a container that is often `/`, and so every file."""
        found = problems({}, {"ADAPTER_MODEL_ROOTS": text})
        assert all(each.startswith("environment ADAPTER_MODEL_ROOTS: '': ") for each in found)
        assert "write a path" in found[0]

    @pytest.mark.parametrize("name", ["cache_dir", "repository", "tritonserver", "single_model"])
    def test_empty_flag_is_no_path(self, name):
        """A shell passes on `--cache-dir=$CACHE` with a variable that is not set."""
        [problem] = problems({name: ""})
        assert problem.startswith(f"flag {flag_of(name)}: '': write a path")

    @pytest.mark.parametrize("text", ["[]", "[/m, 2]", "[null]", "[[]]"])
    def test_single_model_is_a_list_of_texts(self, tmp_path, text):
        """YAML reads the name of a folder that is a number as a number."""
        file = tmp_path / "settings.yaml"
        file.write_text(f"single_model: {text}")
        [problem] = problems(file=file)
        assert problem.endswith("write FOLDER, or a list of it and of names, each a text")

    def test_any_free_port_is_for_the_embedded_triton(self):
        flags = {"triton_grpc": "127.0.0.1:0", "triton": "embedded"}
        assert load(flags).settings.triton_grpc.port == 0

    @pytest.mark.parametrize("text", ["unix:/run/triton.sock", "off"])
    def test_triton_is_reached_by_host_and_port_alone(self, text):
        [problem] = problems({"triton": "embedded", "triton_http": text})
        assert problem == f"flag --triton-http: {text!r}: write HOST:PORT or [IPV6]:PORT"

    def test_host_names_come_repeated_or_comma_separated(self):
        names = ("a.example", "b_2")
        assert load({"allowed_hosts": list(names)}).settings.allowed_hosts == names
        environ = {"ADAPTER_ALLOWED_HOSTS": ",".join(names)}
        assert load({}, environ).settings.allowed_hosts == names

    def test_arguments_with_an_open_quote_are_refused(self):
        [problem] = problems({}, {"ADAPTER_TRITON_ARGS": "--a 'b"})
        assert problem == 'environment ADAPTER_TRITON_ARGS: "--a \'b": No closing quotation'

    @pytest.mark.parametrize(
        ("option", "reason"),
        [
            ("--http-port", "triton_http decides"),
            ("--http-address", "triton_http decides"),
            ("--grpc-port", "triton_grpc decides"),
            ("--grpc-address", "triton_grpc decides"),
            ("--metrics-port", "triton_metrics decides"),
            ("--metrics-address", "triton_metrics decides"),
            ("--model-repository", "repository decides"),
            ("--model-store", "repository decides"),
            ("--model-control-mode", "the adapter sets to explicit"),
            ("--strict-readiness", "the adapter sets to false"),
            ("--http-max-input-size", "max_body_bytes decides"),
            ("--grpc-max-response-pool-size", "the adapter sets"),
            ("--allow-client-shm", "passthrough decides"),
            ("--model-config-name", "leaves files to Triton that the adapter has not checked"),
        ],
    )
    @pytest.mark.parametrize("spelling", ["{}=9", "{} 9"])
    def test_triton_args_are_refused_when_adapter_decides(self, option, reason, spelling):
        """Of two such options tritonserver takes the last, and the adapter would not find it."""
        environ = {"ADAPTER_TRITON_ARGS": f"--log-verbose=1 {spelling.format(option)}"}
        [problem] = problems({"triton": "embedded"}, environ)
        assert problem.endswith(f": triton_args has {option}, which {reason}")
        assert problem.startswith("environment ADAPTER_TRITON_ARGS: ")
        flags = {"triton": "embedded", "triton_args": [spelling.format(option)]}
        assert problems(flags)[0].endswith(f": triton_args has {option}, which {reason}")

    def test_nothing_is_suggested_for_name_like_no_other(self):
        assert problems({}, {"ADAPTER_XYZZY": "1"}) == [
            "environment ADAPTER_XYZZY: no such setting"
        ]

    @pytest.mark.parametrize("text", ["- a\n- b\n", "a: [\n", "\x00", "plain"])
    def test_file_that_holds_no_settings_is_one_problem(self, write, text):
        path = write(text)
        [problem] = problems({}, {}, path)
        assert problem.startswith("flag --config: ")
        assert str(path) in problem
        assert "\n" not in problem

    def test_yaml_fault_is_reported_with_its_position(self, write):
        path = write("http: off\n\ngrpc: off: on\n")
        assert problems({}, {}, path) == [
            f"flag --config: {path}:3:10: mapping values are not allowed here"
        ]

    def test_missing_file_is_reported_in_words(self, tmp_path):
        path = tmp_path / "none.yaml"
        assert problems({}, {}, path) == [
            f"flag --config: {str(path)!r}: No such file or directory"
        ]

    def test_missing_file_names_its_source(self, tmp_path):
        missing = str(tmp_path / "none.yaml")
        found = problems({"http": "x"}, {"ADAPTER_CONFIG": missing})
        assert found[0].startswith(f"environment ADAPTER_CONFIG: {missing!r}: ")
        assert found[1].startswith("flag --http: 'x': ")


class TestStores:
    def test_endpoint_is_a_name_and_url(self, write):
        file = write("endpoints: {team-a: {models: 's3://b/a'}, team-b: /srv/b}")
        named = ["team-a=s3://b/a", "team-b=/srv/b"]
        for loaded in (
            load(file=file),
            load({"endpoints": named}),
            load(environ={"ADAPTER_ENDPOINTS": "\n".join(named)}),
        ):
            assert [str(each) for each in loaded.settings.endpoints] == named

    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("team", "NAME=URL"),
            ("a=/x\na=/y", "'a' occurs twice"),
            ("a_b=/x", "letters, digits and dashes"),
            ("a" * 64 + "=/x", "at most 63"),
            ("a=ftp://x", "write s3://"),
        ],
    )
    def test_what_is_no_endpoint_is_refused_with_rule(self, text, rule):
        [problem] = problems(environ={"ADAPTER_ENDPOINTS": text})
        assert rule in problem


def test_preload_takes_one_key_a_line():
    environ = {"ADAPTER_PRELOAD": "a.tar.gz\nteam:a/b,c", "ADAPTER_MODEL_STORE": "s3://b"}
    loaded = load(environ=environ)
    assert loaded.settings.preload == ("a.tar.gz", "team:a/b,c")
    (problem,) = problems({"preload": ["../secrets"], "model_store": "s3://b"})
    assert "has a part that is empty, '.' or '..'" in problem
