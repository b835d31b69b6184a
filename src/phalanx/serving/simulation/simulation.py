"""The event loop: arrivals, ends of steps, transferred caches; then idle workers plan their next step.

All events of one time are handled before any worker plans, so that requests that arrive together are batched
together. The same seed gives the same history.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from phalanx.serving.simulation.deployment import Deployment, require_fits
from phalanx.serving.simulation.requests import Floats, Requests
from phalanx.serving.simulation.worker import Requested, Worker

_DUE, _ACCEPTED, _COMES, _STEP_ENDS, _CACHE_MOVED = range(5)


@dataclass(frozen=True)
class RequestHistory:
    """The history of n requests; times in seconds from the start."""

    requests: Requests
    arrival: Floats
    """(n,) times of arrival."""
    admitted: Floats
    """(n,) times at which the requests have a slot and pages."""
    first: Floats
    """(n,) times at which the first tokens are computed."""
    done: Floats
    """(n,) times at which the last tokens are sent."""
    sent: Floats
    """(runs, 3): end, seconds and tokens of the runs of steps of all workers, by end."""
    gaps: Floats
    """(runs, 3): tokens of a run, and seconds between a sequence's tokens at its first and its last step."""
    preemptions: int
    after: Floats | None = None
    """(n,) seconds of the worker's step after the first token, 0: no step follows; None: the request's time per
    token."""


def simulate(deployment: Deployment, requests: Requests, seed: int = 0) -> RequestHistory:
    """Return the history of serving all requests. Raises InputError for a request that no cache can hold."""
    require_fits(deployment, requests)
    return _Loop(deployment, requests, seed).run()


class _Loop:
    """The pending events and the workers. Requests arrive when they are due, or, if concurrent requests are limited,
    when an earlier one is done; in a closed loop always when an earlier one is done."""

    def __init__(self, deployment: Deployment, requests: Requests, seed: int) -> None:
        self._requests, self._transfer = requests, deployment.transfer
        self._accept_s, self._accept_token_s = deployment.accept_s, deployment.accept_token_s
        self._accepted = self._tokenised = 0.0  # times at which all requests so far, and all prompts, are done
        n = len(requests)
        self._shared = Requested(
            requests.input.tolist(),
            requests.output.tolist(),
            _as_list(requests.reused, n),
            _as_list(requests.priority, n),
            _as_list(requests.adapter, n),
        )
        # Heap of (time, number, kind, request or worker, version of the worker's plan).
        self._events: list[tuple[float, int, int, int, int]] = []
        self._pushed = 0
        self._closed = requests.arrival is None
        self._arrival = [0.0] * n if requests.arrival is None else requests.arrival.tolist()
        self._coming = min(requests.users, n) if self._closed else 0  # requests of a closed loop that were sent
        for request in range(self._coming):
            self._arrival[request] = request * requests.ramp_s / self._coming
            self._send(request, self._arrival[request])
        self._held: deque[int] = deque()  # due, but over the limit of concurrent requests
        self._under_way = 0
        if not self._closed:
            self._push(self._arrival[0], _DUE, 0)
        specs = deployment.workers
        self._workers = [Worker(x, self._shared, seed + i, self._computed, self._done) for i, x in enumerate(specs)]
        self._entry = [i for i, w in enumerate(self._workers) if w.spec.role != "decode"]
        self._decoders = [i for i, w in enumerate(self._workers) if w.spec.role == "decode"]
        self._link_free = [0.0] * len(specs)  # by worker: the time at which its link has sent all caches
        self._came_from = [0] * n
        self._load = [0] * len(specs)  # by worker: its waiting and running requests
        self._at = [0] * n

    def run(self) -> RequestHistory:
        """Handle all events of each time together, and let the affected workers plan their next step; return the
        history."""
        events, workers = self._events, self._workers
        while events:
            now = events[0][0]
            touched: dict[int, None] = {}
            while events and events[0][0] == now:
                _, _, kind, worker_index, version = heappop(events)
                if kind == _STEP_ENDS:
                    worker = workers[worker_index]
                    if version == worker.version and worker.busy:
                        worker.finish()
                        touched[worker_index] = None
                elif kind == _DUE:
                    self._due(worker_index, now)
                elif kind == _ACCEPTED:
                    self._accept(worker_index, now)
                elif kind == _COMES:
                    touched[self._take_in(worker_index)] = None
                else:
                    for i in self._hand_over(worker_index):
                        touched[i] = None
            for i in touched:
                worker = workers[i]
                if worker.busy:
                    if worker.run > 1 and worker.admits() and worker.cut(now):
                        self._push(max(now, worker.ends), _STEP_ENDS, i, worker.version)
                elif worker.plan(now):
                    self._push(worker.ends, _STEP_ENDS, i, worker.version)
        return self._history()

    def _push(self, time: float, kind: int, who: int, version: int = 0) -> None:
        self._pushed += 1
        heappush(self._events, (time, self._pushed, kind, who, version))

    def _send(self, request: int, now: float) -> None:
        """Send a request to the workers, after the server's process has accepted it."""
        if not self._accept_s:
            self._push(now, _COMES, request)
            return
        self._accepted = max(now, self._accepted) + self._accept_s
        self._push(self._accepted, _ACCEPTED, request)

    def _accept(self, request: int, now: float) -> None:
        """Tokenise an accepted prompt, after earlier ones. The server's event loop passes it on after accepting all
        requests that have arrived, so of requests that arrive together none begins before the last is accepted."""
        seconds = self._accept_token_s * self._shared.input[request]
        self._tokenised = max(now, self._tokenised) + seconds
        self._push(max(self._accepted, self._tokenised), _COMES, request)

    def _route(self, request: int, among: list[int], with_tokens: int = 0) -> int:
        """Give a request to the least loaded of some workers; return the worker's number."""
        to = min(among, key=self._load.__getitem__)  # the first of equals
        self._load[to] += 1
        self._at[request] = to
        self._workers[to].add(request, with_tokens)
        return to

    def _due(self, request: int, now: float) -> None:
        """Send a request that is due, or hold it at the limit of concurrent requests."""
        if request + 1 < len(self._requests):
            self._push(self._arrival[request + 1], _DUE, request + 1)
        if self._requests.users and self._under_way >= self._requests.users:
            self._held.append(request)
            return
        self._under_way += 1
        self._send(request, now)

    def _take_in(self, request: int) -> int:
        """Route an arriving request to a worker; return the worker's number."""
        to = self._came_from[request] = self._route(request, self._entry)
        return to

    def _hand_over(self, request: int) -> tuple[int, int]:
        """Route a request whose cache was transferred to a decode worker; return (its prefill worker, its decode
        worker)."""
        here, tokens = self._came_from[request], self._shared.input[request]
        self._workers[here].handed_on(tokens)
        return here, self._route(request, self._decoders, tokens)

    def _computed(self, request: int, now: float) -> None:
        """Send the cache of a prompt over the link of its worker, after earlier ones."""
        assert self._transfer is not None
        here = self._came_from[request]
        self._load[here] -= 1
        self._link_free[here] = max(now, self._link_free[here]) + self._transfer.seconds(self._shared.input[request])
        self._push(self._link_free[here], _CACHE_MOVED, request)

    def _done(self, request: int, now: float) -> None:
        self._shared.done[request] = now
        self._load[self._at[request]] -= 1
        if self._closed and self._coming < len(self._requests):
            self._arrival[self._coming] = now
            self._send(self._coming, now)
            self._coming += 1
        elif self._held:
            self._arrival[self._held[0]] = now
            self._send(self._held.popleft(), now)
        else:
            self._under_way -= 1

    def _history(self) -> RequestHistory:
        sent = sorted(row for worker in self._workers for row in worker.sent)
        gaps = [row for worker in self._workers for row in worker.gaps if row[0]]
        return RequestHistory(
            self._requests,
            np.array(self._arrival),
            np.array(self._shared.admitted),
            np.array(self._shared.first),
            np.array(self._shared.done),
            np.array(sent, float).reshape(-1, 3),
            np.array(gaps, float).reshape(-1, 3),
            self._shared.preemptions,
            np.array(self._shared.after),
        )


def _as_list(column: Any, n: int) -> list[int]:
    return [0] * n if column is None else column.tolist()
