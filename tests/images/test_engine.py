"""scripts/engine.sh takes away the engine that it has started, whatever became of the command."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = (Path(__file__).resolve().parents[2] / "scripts/engine.sh").read_text(encoding="utf-8")
FUNCTIONS = "".join(
    re.findall(r"^(?:restore_rules|stop_engine)\(\) \{\n.*?^\}\n", SCRIPT, re.MULTILINE | re.DOTALL)
)


@pytest.mark.parametrize("rules", ["*filter\nCOMMIT\n", ""], ids=["rules", "no-rules"])
@pytest.mark.parametrize("command", ["true", "false"])
def test_failed_command_leaves_nothing(tmp_path, command, rules):
    """With stand-ins for what changes the machine; each writes down how it was called."""
    (folder := tmp_path / "engine").mkdir()
    (folder / "rules").write_text(rules)
    (stand_ins := tmp_path / "bin").mkdir()
    for name in ("iptables", "iptables-restore", "ip", "umount"):
        path = stand_ins / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n')
        path.chmod(0o755)
    script = f"set -euo pipefail\n{FUNCTIONS}folder={folder}; made_bridge=yes\n"

    done = subprocess.run(
        ["bash", "-c", f"{script}trap stop_engine EXIT\n{command}\n"],
        env={"PATH": f"{stand_ins}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (int(command == "false"), "")
    assert not folder.exists()
    assert "ip link del docker0" in (tmp_path / "calls").read_text()
