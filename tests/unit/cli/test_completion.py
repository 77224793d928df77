"""What shells propose, by the scripts that `triton-adapter completion` prints."""

import io
import subprocess
from contextlib import redirect_stdout

import pytest

from adapter.cli.commands import COMMANDS
from adapter.cli.main import main


@pytest.fixture(scope="module")
def script():
    """What completes the command in bash."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(["completion", "bash"], {}) == 0
    return out.getvalue()


class TestCompletion:
    @pytest.fixture
    def complete(self, script, tmp_path):
        """What bash proposes for the last of the words."""

        def complete(*words):
            asked = " ".join(f"'{word}'" for word in words)
            lines = (
                script,
                f"COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}'",
                'COMP_POINT=${#COMP_LINE}; _triton_adapter; printf "%s\n" "${COMPREPLY[@]}"',
            )
            done = subprocess.run(
                ["bash", "-c", "\n".join(lines), "bash", *words],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
                cwd=tmp_path,
            )
            return set(done.stdout.split())

        return complete

    def test_commands_are_completed(self, complete):
        assert complete("triton-adapter", "") >= set(COMMANDS)
        assert complete("triton-adapter", "un") == {"unload"}

    def test_flags_are_completed(self, complete):
        assert complete("triton-adapter", "ps", "--w") == {"--watch"}
        assert complete("triton-adapter", "serve", "--memory-l") == {"--memory-limit"}

    @pytest.mark.parametrize(
        ("words", "values"),
        [
            (("--triton", "="), {"external", "embedded"}),
            (("--triton", "=", "em"), {"embedded"}),
            (("--log-format=json", "--triton", "=", "ex"), {"external"}),
            (("--triton=em",), {"--triton=embedded"}),
        ],
    )
    def test_a_value_behind_an_equals_sign_is_completed(self, complete, words, values):
        """Bash makes words of their own of `=`, unless COMP_WORDBREAKS lacks it."""
        assert complete("triton-adapter", "serve", *words) == values

    def test_files_are_completed_where_a_file_is_wanted(self, complete, tmp_path):
        (tmp_path / "adapter.yaml").touch()
        assert complete("triton-adapter", "serve", "--config", "ad") == {"adapter.yaml"}

    @pytest.mark.parametrize("shell", ["zsh", "tcsh"])
    def test_other_shells_have_a_script_too(self, run, shell):
        code, out, err = run("completion", shell)
        assert (code, err) == (0, "")
        assert "unload" in out
