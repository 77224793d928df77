"""What `serve --examples` says once it is ready."""

from types import SimpleNamespace

import pytest

from adapter.cli.serve import print_welcome

USUAL = {"http": "127.0.0.1:8080", "admin": "127.0.0.1:8081", "grpc": "127.0.0.1:8085"}


def test_unusual_listeners_are_to_be_exported(capsys):
    print_welcome(SimpleNamespace(addresses=USUAL | {"admin": "127.0.0.1:9081", "grpc": "unix:/s"}))
    said = capsys.readouterr().err
    assert "\n  export ADAPTER_ADMIN=127.0.0.1:9081 ADAPTER_GRPC=unix:/s\n" in said


@pytest.mark.parametrize("off", [{}, {"grpc"}])
def test_those_that_are_need_no_word(capsys, off):
    print_welcome(SimpleNamespace(addresses={k: v for k, v in USUAL.items() if k not in off}))
    said = capsys.readouterr().err
    assert "curl -s -X DELETE http://127.0.0.1:8080/models/digits" in said
    assert "export" not in said
