"""What the fakes were told, in order over all of them; any call can be held up or made to fail."""

import asyncio


class Gate:
    """`reached` is set when a call stands before it; `opened` lets it through."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    def open(self) -> None:
        self.opened.set()


class Calls:
    """A call is a verb and, where it is about a model, its name: `load`, or `load m` alone."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._gates: dict[str, Gate] = {}
        self._held: list[Gate] = []
        self._errors: dict[str, BaseException] = {}

    def hold(self, call: str) -> Gate:
        """Stop the next such call until the gate is opened."""
        gate = self._gates[call] = Gate()
        self._held.append(gate)
        return gate

    def open_all(self) -> None:
        """Let every call go on that is held."""
        for gate in self._held:
            gate.open()

    def fail(self, call: str, error: BaseException) -> None:
        """Let the next such call fail."""
        self._errors[call] = error

    async def take(self, verb: str, name: str = "") -> None:
        call = f"{verb} {name}".strip()
        self.seen.append(call)
        await asyncio.sleep(0)  # so that a caller can be cancelled at every call
        for key in dict.fromkeys((call, verb)):
            if gate := self._gates.pop(key, None):
                gate.reached.set()
                await gate.opened.wait()
            if error := self._errors.pop(key, None):
                raise error
