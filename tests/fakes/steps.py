"""What the fakes were told, in order over all of them; any step can be held up or made to fail."""

import asyncio


class Gate:
    """`reached` is set when a step stands before it; `opened` lets it through."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    def open(self) -> None:
        self.opened.set()


class Steps:
    """A step is a verb and, where it is about a model, its name: `load`, or `load m` alone."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._gates: dict[str, Gate] = {}
        self._held: list[Gate] = []
        self._errors: dict[str, BaseException] = {}

    def hold(self, step: str) -> Gate:
        """Stop the next such step until the gate is opened."""
        gate = self._gates[step] = Gate()
        self._held.append(gate)
        return gate

    def open_all(self) -> None:
        """Let every step go on that is held."""
        for gate in self._held:
            gate.open()

    def fail(self, step: str, error: BaseException) -> None:
        """Let the next such step fail."""
        self._errors[step] = error

    async def take(self, verb: str, name: str = "") -> None:
        step = f"{verb} {name}".strip()
        self.seen.append(step)
        await asyncio.sleep(0)  # so that a caller can be cancelled at every step
        for key in dict.fromkeys((step, verb)):
            if gate := self._gates.pop(key, None):
                gate.reached.set()
                await gate.opened.wait()
            if error := self._errors.pop(key, None):
                raise error
