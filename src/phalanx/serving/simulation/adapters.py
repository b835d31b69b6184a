"""LoRA adapters on a worker's GPU: a batch uses at most `places`, and a new one takes that of the idle one used least
recently.

A request whose adapter has no place lets later ones pass, as in vLLM's scheduler. It leaves the queue until a place
is idle, so that a step does not look through all that wait.
"""

Entry = tuple[int, int, int]  # of the queue: (priority, request, tokens that came with it)


class Adapters:
    """The places of one worker, and the requests that wait for one."""

    def __init__(self, places: int, load_s: float):
        self.places, self.load_s = places, load_s
        self.users: dict[int, int] = {}  # requests that use each adapter on the GPU, least recently used first
        self.idle = 0  # adapters on the GPU that no request uses
        self.passed: list[Entry] = []  # requests whose adapters have no place; empty where one is idle

    def has_place(self, adapter: int) -> bool:
        return adapter in self.users or len(self.users) < self.places or self.idle > 0

    def use(self, adapter: int) -> float:
        """Count a request on its adapter, which has a place; return the seconds of loading it."""
        seconds = 0.0
        if adapter not in self.users:
            if len(self.users) == self.places:
                del self.users[next(a for a, users in self.users.items() if not users)]
                self.idle -= 1
            seconds = self.load_s
        elif not self.users[adapter]:
            self.idle -= 1
        self.users[adapter] = self.users.pop(adapter, 0) + 1
        return seconds

    def leave(self, adapter: int) -> list[Entry]:
        """Count a request off its adapter; return the requests that waited if a place is idle now."""
        self.users[adapter] -= 1
        if self.users[adapter]:
            return []
        self.idle += 1
        entries, self.passed = self.passed, []
        return entries
