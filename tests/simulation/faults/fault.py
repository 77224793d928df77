"""How a fault is put back: one function is compiled anew, with other lines in place of some."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """`breaks` says what goes wrong with it. In the function `attribute` of `owner` `becomes` takes
    the place of `was`. `test` fails with it, where a minute of days does not find it.
    """

    name: str
    breaks: str
    owner: object  # a class or a module
    attribute: str
    was: str
    becomes: str
    test: str = ""

    @contextmanager
    def put_back(self) -> Iterator[None]:
        right = inspect.getattr_static(self.owner, self.attribute)
        setattr(self.owner, self.attribute, self._wrong(inspect.unwrap(right)))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, right)

    def _wrong(self, right: object) -> object:
        source = textwrap.dedent(inspect.getsource(right))
        if self.was not in source:
            raise LookupError(f"{self.name}: {self.attribute} has no {self.was!r}")
        found: dict[str, object] = {}
        code = compile(source.replace(self.was, self.becomes, 1), f"<{self.name}>", "exec")
        exec(code, right.__globals__, found)  # noqa: S102 - a test's own text
        return found[self.attribute]
