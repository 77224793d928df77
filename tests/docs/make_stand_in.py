"""Runs the recipe of a target of the Makefile as make would, but sets nothing up before it.

`make` itself would first install the locked packages, which the tests have from elsewhere.
"""

import os
import re
import sys
from pathlib import Path


def script(makefile: str, target: str, environment: dict[str, str]) -> str:
    text = makefile.replace("\\\n", " ")
    defaults = dict(re.findall(r"^(\w+) \?= (.*)$", text, re.MULTILINE))
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"no rule to make target {target!r}")
    recipe = re.sub(r"^\t@?", "", found[1], flags=re.MULTILINE)
    while "$(" in recipe:  # a variable may have another in it
        recipe = re.sub(r"\$\((\w+)\)", lambda name: (defaults | environment)[name[1]], recipe)
    return recipe


if __name__ == "__main__":
    if sys.argv[1].startswith("setup"):
        sys.exit(0)
    recipe = script(Path("Makefile").read_text(encoding="utf-8"), sys.argv[1], dict(os.environ))
    os.execvp("sh", ["sh", "-ec", recipe])  # noqa: S606
