"""The rendezvous of a local launcher's agent, which has no other agent to meet.

torch's own (backend c10d) would listen on all interfaces and unpickle what anybody stored there
(torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:444). Here the agent's store is a table in its own memory.
"""

from __future__ import annotations

import uuid

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one agent with itself. Every attempt has a new store; nothing listens."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex

    @property
    def use_agent_store(self) -> bool:
        """Always False: the ranks have a store of their own."""
        return False

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the only agent's place, and an address that no rank uses."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Return False: a local rendezvous stays open."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could come."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """Return a name that no other run has."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: there is nothing to close."""
        return True
