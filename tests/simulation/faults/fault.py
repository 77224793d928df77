"""Describes a planted fault: a port, the door, or the settings of control are changed.

A fault knows nothing of what is behind the door, so that it can be planted into any control.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.catalog import Terms
from tests.simulation.control import Control, Machine, PlayedControl
from tests.simulation.plan import Settings


class Changed:
    """Replaces some members of a port, or of a part of the door."""

    def __init__(self, target: Any, **members: Any) -> None:
        self._target = target
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _keep(part: Any) -> Any:
    return part


@dataclass(frozen=True, slots=True)
class Fault:
    """Builds a control with one fault."""

    name: str
    breaks: str  # in the words of a caller or an operator
    machine: Callable[[Machine], Machine] = _keep
    settings: Callable[[Settings], Settings] = _keep
    terms: Callable[[Terms], Terms] = _keep
    control: Callable[[Control], Control] = _keep

    def build(self, machine: Machine, settings: Settings, terms: Terms | None) -> Control:
        """Build the control, as tests.simulation.control.Build."""
        if terms is not None:
            terms = self.terms(terms)
        machine = self.machine(machine)
        return self.control(PlayedControl(machine, self.settings(settings), terms))
