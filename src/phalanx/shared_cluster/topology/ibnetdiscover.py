"""The topology file of `ibnetdiscover`, with switches and their ports, and the list of `iblinkinfo`.

Grammar (linux-rdma/rdma-core, infiniband-diags, ibnetdiscover(8), "Topology file format"):

    Switch  24 "S-005442ba00003080"      # "ISR9024 Voltaire" base port 0 lid 6 lmc 0
    [22]    "H-0008f10403961354"[1](8f10403961355)    # "node01 HCA-1" lid 4 4xSDR
    [10]    "S-0008f10400410015"[1]      # "SW-6IB4 Voltaire" lid 3 4xSDR

Each port in use has a line: local port, peer (S switch, H host adapter, R router), the peer's port, description and
LID, and the link's width and speed. The first word of a host's description is its name; an adapter without a
name has its model there. Hosts whose adapters are at the same switches are one leaf: with rails, each adapter of a
host is at a different switch. The list of links has LID and port of both ends, and the rate of a lane on the wire:

    Switch: 0x0c42a10300b95bfa MF0;ibswitch254:MQM8700/U1:
           3    1[  ] ==( 4X      25.78125 Gbps Active/  LinkUp)==>       1    1[  ] "node01 HCA-1" ( )
"""

import re

from phalanx.shared_cluster.topology.hostlist import require_host_name
from phalanx.spec.cluster.topology import SwitchTree
from phalanx.spec.errors import InputError

_SWITCH = re.compile(r'^Switch\s+\d+\s+"(S-[0-9a-fA-F]+)"\s*#\s*"([^"]*)"')
_PORT = re.compile(
    r'^\[\d+\](?:\[[^\]]*\])?\s+"([SHR]-[0-9a-fA-F]+)"\[\d+\]\S*\s*#\s*"([^"]*)".*?\b([0-9]{1,2})x([A-Z0-9]+)\s*$'
)
_LONGEST = 4096  # characters of a line
_LANE_GBIT = {"SDR": 2.0, "DDR": 4.0, "QDR": 8.0, "FDR10": 10.0, "FDR": 13.64, "EDR": 25.0, "HDR": 50.0}
_LANE_GBIT |= {"NDR": 100.0, "XDR": 200.0}
"""Gb/s of data in one direction of one lane."""
_LINK = re.compile(
    r"^\s+(\d{1,5})\s+\d+\[[^]]*\] ==\(\s*(\d{1,2})X\s+([\d.]{1,10}) Gbps\s+Active[^=]*==>\s*(\d{1,5})\s"
    r'[^"]*"([^"]*)"'
)
"""A port of a switch in iblinkinfo's list; the port of an adapter begins with its GUID."""
_ENCODED = {"2.5": "SDR", "5.0": "DDR", "10.0": "QDR", "10.3125": "FDR10", "14.0625": "FDR", "25.78125": "EDR"}
_ENCODED |= {"53.125": "HDR", "106.25": "NDR", "212.5": "XDR"}
"""Gb/s of a lane on the wire, as iblinkinfo prints it -> its speed."""
_UNNAMED = re.compile(r"MT\d+ (ConnectX|BlueField)|Mellanox Technologies|Quantum Mellanox")
"""Descriptions of adapters that are no host's, or of a host that is not named."""


def read_topology(text: str, file: str) -> tuple[SwitchTree, float]:
    """Return the tree of switches, and the bytes/s in one direction of the slowest host's link; `file` names the
    file in messages. Raises InputError."""
    hosts: dict[str, dict[str, float]] = {}  # host -> switch -> bytes/s
    peers: dict[str, dict[str, float]] = {}  # switch -> switch -> bytes/s
    switch = ""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LONGEST:
            raise InputError(f"{file} line {number}", None, f"has more than {_LONGEST:,} characters")
        record = _SWITCH.match(line)
        if record:
            switch = record[1]
            peers.setdefault(switch, {})
        elif re.match(r"^(Ca|Rt)\s", line) or not line.strip():
            switch = ""  # a host's own record repeats its links
        elif switch and line.startswith("["):
            port = _PORT.match(line)
            if port is None:
                raise InputError(f"{file} line {number}", line.strip(), "is not a port of ibnetdiscover")
            peer, description, lanes, speed = port.groups()
            if speed not in _LANE_GBIT:
                raise InputError(f"{file} line {number}", speed, "is not a speed of InfiniBand")
            rate = int(lanes) * _LANE_GBIT[speed] * 1e9 / 8
            if peer.startswith("S-"):
                peers[switch][peer] = peers[switch].get(peer, 0.0) + rate
            elif peer.startswith("H-"):
                _add(hosts, description, switch, rate, f"{file} line {number}")
    return _tree_and_rate(hosts, peers, file)


def read_links(text: str, file: str) -> tuple[SwitchTree, float]:
    """Return the same of the list of `iblinkinfo`. Raises InputError."""
    hosts: dict[str, dict[str, float]] = {}
    ports: list[tuple[str, str, float, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{file} line {number}"
        if len(line) > _LONGEST:
            raise InputError(place, None, f"has more than {_LONGEST:,} characters")
        if link := _LINK.match(line):
            switch, lanes, gbit, peer, description = link.groups()
            if gbit not in _ENCODED:
                raise InputError(place, gbit, "is not a rate of an InfiniBand lane in Gb/s")
            rate = int(lanes) * _LANE_GBIT[_ENCODED[gbit]] * 1e9 / 8
            ports.append((switch, peer, rate, description, place))
    peers: dict[str, dict[str, float]] = {switch: {} for switch, *_ in ports}
    for switch, peer, rate, description, place in ports:
        if peer in peers:
            peers[switch][peer] = peers[switch].get(peer, 0.0) + rate
        else:
            _add(hosts, description, switch, rate, place)
    return _tree_and_rate(hosts, peers, file)


def notes(text: str) -> list[str]:
    """Return a note on the adapters of a fabric whose hosts are not named."""
    ports = re.findall(r'^\[\d+\]\S*\s+"(H-\w+)"\S*\s*#\s*"MT\d+ (?:ConnectX|BlueField)', text, re.M)
    count = f"{len(set(ports)):,} adapter{'s' * (len(set(ports)) > 1)}"
    return [f"{count} named for the model, and not for a host (by rdma-ndd): left out"] if ports else []


def _add(hosts: dict[str, dict[str, float]], description: str, switch: str, rate: float, where: str) -> None:
    if description.strip() and not _UNNAMED.match(description):
        links = hosts.setdefault(require_host_name(description.split()[0], where), {})
        links[switch] = links.get(switch, 0.0) + rate


def _tree_and_rate(
    hosts: dict[str, dict[str, float]], peers: dict[str, dict[str, float]], file: str
) -> tuple[SwitchTree, float]:
    if not hosts:
        raise InputError(file, None, "has no switch with hosts", "write it with: ibnetdiscover > FILE")
    return _tree(hosts, peers), min(rate for links in hosts.values() for rate in links.values())


def _tree(hosts: dict[str, dict[str, float]], peers: dict[str, dict[str, float]]) -> SwitchTree:
    by_switches: dict[tuple[str, ...], list[str]] = {}
    for host, links in hosts.items():
        by_switches.setdefault(tuple(sorted(links)), []).append(host)
    leaves = {f"leaf{i}": tuple(sorted(names)) for i, names in enumerate(by_switches.values())}
    at_hosts = {switch for switches in by_switches for switch in switches}
    spines = sorted({peer for switch in at_hosts for peer in peers.get(switch, {}) if peer not in at_hosts})
    down = {s: sum(links.get(s, 0.0) for links in hosts.values()) for s in at_hosts}
    up = {s: sum(peers.get(s, {}).values()) for s in at_hosts}
    ratios = [down[s] / up[s] for s in at_hosts if up[s]]
    above = {"spine": tuple(leaves)} if len(leaves) > 1 and (spines or any(up.values())) else {}
    return SwitchTree(leaves, above, max(1.0, *ratios) if ratios else 1.0)
