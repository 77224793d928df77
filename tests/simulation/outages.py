"""Play what is done to the world: faults that are set for the next act, or come at once."""

import asyncio

from tests.simulation.models import Entry


class Outages:
    """A part of the world."""

    def play_fault(self, entry: Entry) -> None:
        verb, words = entry.verb, entry.words
        self.oracle.happened(verb)
        self.story.note(f"fault: {verb}", words=words)
        if verb != "fault":
            self.faults[verb] += 1
        plays = {
            "fault": self._set_fault,
            "crash": self.triton.end,
            "hang": lambda seconds: self.begin(self._hang(seconds)),
            "stub": self._end_stub,
            "strangers": self._strangers_come,
            "unread": self._unread,
        }
        plays[verb](*words)

    def _set_fault(self, verb: str, model_id: str, fault: str) -> None:
        self._set_faults[verb, model_id].append(fault)

    def _end_stub(self, model_id: str) -> None:
        for each in self.processes_of(model_id):
            self.triton.processes.end(each)
        self.oracle.happened("stub ended", model_id)

    def _strangers_come(self, count: int, seconds: float) -> None:
        self.truth.add("strangers", count)
        self._loop.call_later(seconds, self._strangers_leave, count)

    def _unread(self, seconds: float) -> None:
        self.reader.unread_until = self.now + seconds

    def _strangers_leave(self, count: int) -> None:
        self.oracle.happened("strangers")
        self.truth.add("strangers", -count)

    def stop_faults(self) -> None:
        self._set_faults.clear()
        self.reader.unread_until = self.triton.hung_until = 0.0

    async def _hang(self, seconds: float) -> None:
        """Triton answers nothing for a while, and has all its models afterwards."""
        if (life := self.triton.life) is None:
            return
        self.triton.hung_until = max(self.triton.hung_until, self.now + seconds)
        await asyncio.sleep(min(1.0, seconds))
        if self.triton.life is not life or seconds < 1.0:
            return
        self.triton.live = False
        await asyncio.sleep(max(0.0, self.triton.hung_until - self.now))
        if self.triton.life is life and not self.triton.live:
            self.oracle.happened("hang")
            self.triton.answers()
