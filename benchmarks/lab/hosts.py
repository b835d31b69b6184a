"""The lab: hosts with shaped links on one machine, made of network namespaces, veth pairs and `tc tbf`.

    host 0 [eth0] ---- [eth0] host 1        two hosts: one cable
    host k [eth0] ---- [port k] switch      more: a bridge, in its own namespace

A host is a network namespace with a loopback and one interface, whose egress is shaped: what its ranks send to other
hosts shares that rate and is counted there; traffic inside the host uses its loopback. The lab has no way out.
Hosts have their own names, but share processors, memory, files and process ids: byte counts are exact at any load,
times are those of a single machine.

A lab removes itself when its context ends, however that happens. One that was killed with SIGKILL cannot: its
namespaces carry its process id and start time in their names, and the next lab that starts removes them, with the
processes that still run inside.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.spec.errors import InputError

INTERFACE = "eth0"
TORCHRUN = Path(__file__).with_name("torchrun.py")
_MTU = 9000  # as in clusters: headers are under 1 % of what is sent
_PREFIX = "phalanx-lab-"
# /usr/sbin and /sbin are not on the PATH of every user.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_NAMESPACES, _ETC = Path("/run/netns"), Path("/etc/netns")
# As clusters are tuned, and the same wherever the lab runs: no slow start after a pause, no pacing by a model of wide
# area networks, no retransmission of what a busy machine has not acknowledged yet, no background traffic.
_SETTINGS = """
cd /proc/sys/net
set_to() { [ ! -e $1 ] || echo "$2" > $1; }
grep -qw cubic ipv4/tcp_available_congestion_control && set_to ipv4/tcp_congestion_control cubic
set_to ipv4/tcp_slow_start_after_idle 0
set_to ipv4/tcp_early_retrans 0
set_to ipv4/tcp_recovery 0
set_to ipv4/tcp_reordering 100
set_to ipv6/conf/all/disable_ipv6 1
set_to ipv6/conf/default/disable_ipv6 1
"""
# One processor handles what arrives: two would reorder packets, and TCP would retransmit those that are only late.
_IN_ORDER = "for f in /sys/class/net/*/queues/rx-0/rps_cpus; do echo 1 > $f; done 2>/dev/null; true"
_PORT = 29400
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PR_SET_PDEATHSIG, _CLONE_NEWNET, _CLONE_NEWUTS = 1, 0x40000000, 0x04000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Traffic:
    """Bytes over a host's interface since the lab was built."""

    sent: int
    received: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


def bytes_per_s(rate: str) -> float:
    """Parse a rate as `tc` writes it, such as 1gbit or 500mbit (powers of 1000). Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit", rate.strip().lower())
    if match is None or not float(match[1]):
        raise InputError("rate", rate, "is not a rate", "write 1gbit or 500mbit")
    return float(match[1]) * _UNITS[match[2]] / 8


def unavailable() -> str:
    """Return why there can be no lab on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"needs iproute2: no {' and no '.join(missing)} here"
    probe = f"{_PREFIX}{_me()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        try:
            _run("ip", "-n", probe, "link", "add", INTERFACE, "type", "veth", "peer", "name", "peer")
            _run("tc", "-n", probe, "qdisc", "add", "dev", INTERFACE, *_shaper(1e8))
        finally:
            _run("ip", "netns", "delete", probe)
    except LabError as error:
        return f"is refused by this system: {error}"
    return ""


class LabError(RuntimeError):
    """A failure of `ip` or `tc`; the message is theirs."""


def enter(namespace: str) -> None:
    """Move the calling thread to a host of the lab, for a process that has just been forked. Raises OSError."""
    with (_NAMESPACES / namespace).open() as file:
        if _libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    _set_host_name(_host_name(namespace))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _set_host_name(name: str) -> None:
    """Set the host name that this process and its children see."""
    if _libc.unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "cannot set its host name")
    socket.sethostname(name)


def _host_name(namespace: str) -> str:
    return f"host{namespace.rsplit('-h', 1)[1]}"


class Lab:
    """A lab of `hosts` hosts whose links send `rate_bytes_per_s` (None: unlimited).

    A context manager: the lab exists only inside its context. Raises InputError if this machine cannot have one.
    """

    def __init__(self, hosts: int, rate_bytes_per_s: float | None = None) -> None:
        if not 1 <= hosts <= 100:
            raise InputError("hosts", hosts, "must be 1 to 100")
        self.hosts, self.rate = hosts, rate_bytes_per_s
        self._name = f"{_PREFIX}{_me()}-{_next_number()}"
        self._children: list[subprocess.Popen[Any]] = []
        self._gone: set[int] = set()

    def __enter__(self) -> Lab:
        why = unavailable()
        if why:
            raise InputError("lab", None, why)
        self.swept = sweep()
        """Remains of killed labs, which were removed on entry."""
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace(self, host: int) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._name}-h{host}"

    def address(self, host: int) -> str:
        """Return a host's IP address."""
        return f"10.77.0.{101 + host}"  # all of one length: torch's rendezvous sorts addresses as text

    def _build(self) -> None:
        for host in range(self.hosts):
            # `ip netns exec` mounts these files over /etc: hosts know each other, and ask no name server.
            etc = _ETC / self.namespace(host)
            etc.mkdir(parents=True)
            entries = [f"{self.address(h)} {_host_name(self.namespace(h))}\n" for h in range(self.hosts)]
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(entries))
            (etc / "resolv.conf").write_text("")
            (etc / "nsswitch.conf").write_text("hosts: files\n")
            _run("ip", "netns", "add", self.namespace(host))
        if self.hosts == 1:
            self._cable(self.namespace(0), INTERFACE, self.namespace(0), "unused")
        elif self.hosts == 2:
            self._cable(self.namespace(0), INTERFACE, self.namespace(1), INTERFACE)
        else:
            switch = f"{self._name}-switch"
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "mtu", str(_MTU), "type", "bridge")
            for host in range(self.hosts):
                self._cable(self.namespace(host), INTERFACE, switch, f"port{host}")
                _run("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            _run("ip", "netns", "exec", switch, "sh", "-c", _IN_ORDER)
        for host in range(self.hosts):
            where = self.namespace(host)
            _run("ip", "netns", "exec", where, "sh", "-c", _SETTINGS)
            _run("ip", "-n", where, "link", "set", "lo", "up")
            _run("ip", "-n", where, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", where, "link", "set", INTERFACE, "up")
            network = self.address(0).rsplit(".", 1)[0] + ".0/24"
            _run("ip", "-n", where, "route", "replace", network, "dev", INTERFACE, "rto_min", "2s")
            _run("ip", "netns", "exec", where, "sh", "-c", _IN_ORDER)
            if self.rate is not None:
                _run("ip", "-n", where, "link", "set", INTERFACE, "gso_max_size", str(_segment(self.rate)))
                _run("tc", "-n", where, "qdisc", "add", "dev", INTERFACE, *_shaper(self.rate))

    def _cable(self, one: str, end: str, other: str, other_end: str) -> None:
        """Connect two namespaces by a veth pair."""
        mtu = ("mtu", str(_MTU))
        _run(
            *("ip", "-n", one, "link", "add", end, *mtu, "type", "veth"),
            *("peer", "name", other_end, *mtu, "netns", other),
        )

    def traffic(self) -> list[Traffic]:
        """Return the bytes that have gone over each host's interface."""
        traffic: list[Traffic] = []
        for host in range(self.hosts):
            links = json.loads(_run("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", INTERFACE))
            stats = links[0]["stats64"]
            traffic.append(Traffic(stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return traffic

    def shape(self, host: int, rate_bytes_per_s: float) -> None:
        """Give the link of one host another rate, in the direction in which it sends."""
        _run("tc", "-n", self.namespace(host), "qdisc", "replace", "dev", INTERFACE, *_shaper(rate_bytes_per_s))

    def start(self, host: int, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a process on a host, which is terminated when this one exits. `how`: keyword arguments of Popen."""
        names = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, "PATH": _PATH}
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        how["env"] = quiet | dict(how.get("env") or os.environ) | names
        inside = ["ip", "netns", "exec", self.namespace(host), *command]
        begin = partial(_begin, _host_name(self.namespace(host)))
        # In a new session: Ctrl-C reaches the lab alone, which ends its hosts in order.
        child = subprocess.Popen(inside, preexec_fn=begin, start_new_session=True, **how)
        self._children.append(child)
        return child

    def torchrun(
        self, host: int, ranks: int, command: Sequence[str], options: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command line that starts `ranks` ranks of `command` on one host, to join those of the others.

        `options` are further options of torchrun, by name without dashes.
        """
        arguments = {
            "nnodes": str(self.hosts),
            "nproc-per-node": str(ranks),
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{self.address(0)}:{_PORT}",
            "rdzv-id": self._name,
            "local-addr": self.address(host),
            **(options or {}),
        }
        conf = f"is_host={int(host == 0)}"
        arguments["rdzv-conf"] = f"{conf},{arguments['rdzv-conf']}" if "rdzv-conf" in arguments else conf
        words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
        return [sys.executable, str(TORCHRUN), *words, *command]

    def lose(self, host: int) -> None:
        """Make a host disappear: unplug its cable, then kill all that runs on it."""
        _run("ip", "-n", self.namespace(host), "link", "set", INTERFACE, "down")
        self._gone.add(host)
        for pid in _inside(self.namespace(host)):
            _signal(pid, signal.SIGKILL)

    @property
    def gone(self) -> frozenset[int]:
        """The hosts that were made to disappear."""
        return frozenset(self._gone)

    def close(self) -> None:
        """End all processes of the lab and remove it. Does nothing the second time."""
        _remove([name for name in _names() if name.startswith(f"{self._name}-")])
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
        self._children = []


def sweep() -> list[str]:
    """Remove the namespaces of labs whose process is gone, with all processes in them; return their names."""
    orphans: dict[str, list[str]] = {}
    for name in _names():
        match = re.match(rf"{_PREFIX}(\d+)\.(\d+)-", name)
        if match and _start_ticks(int(match[1])) != match[2]:
            orphans.setdefault(f"{_PREFIX}{match[1]}", []).append(name)
    for names in orphans.values():
        _remove(names, grace_s=0.0)
    return sorted(orphans)


@contextmanager
def until_stopped() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt too, so that a lab is removed in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(lab: Lab, ranks: int, command: Sequence[str], options: Mapping[str, str] | None = None) -> int:
    """Start torchrun with a command on every host and wait; return the first exit code that is not 0, or 0.

    When one host's ranks have failed, the call returns after a while even if others still run.
    """
    children = [lab.start(h, lab.torchrun(h, ranks, command, options)) for h in range(lab.hosts)]
    deadline, code = float("inf"), 0
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        ended = [c.returncode for h, c in enumerate(children) if c.poll() is not None and h not in lab.gone]
        if any(ended) and not code:
            code, deadline = next(filter(None, ended)), time.monotonic() + 6 * _GRACE_S
        time.sleep(0.05)
    ended = [c.poll() for h, c in enumerate(children) if h not in lab.gone]
    return code or next((c for c in ended if c), 0)


def torchrun_words(command: Sequence[str]) -> list[str]:
    """Return a command in the form that torchrun takes: a script, `-m module`, or any other program."""
    first = Path(command[0]).name
    if first == "phalanx":
        return ["-m", "phalanx", *command[1:]]
    own = len(command) > 1 and (command[1] == "-m" or not command[1].startswith("-"))  # torchrun knows no -c, no -u
    if own and re.fullmatch(r"python[\d.]*", first):
        return list(command[1:])
    if first == "-m" or first.endswith(".py"):
        return list(command)
    return ["--no-python", *command]


def _segment(rate: float) -> int:
    """Return the most bytes that the kernel hands to an interface at once: a quarter of a millisecond of sending."""
    return min(max(_MTU, round(rate / 4000)), 32768)


def _shaper(rate: float) -> list[str]:
    """Return the `tc` words of a token bucket with this rate in bytes per second.

    Burst: a segment, or what accumulates while a timer is late by some microseconds; with more, messages of its size
    would pass unshaped. Queue: a tenth of a second of sending, so that nothing is dropped and retransmitted.
    """
    burst = max(_segment(rate) + _MTU, round(rate * 5e-5))
    limit = max(8 * burst, round(rate / 10))
    return ["root", "tbf", "rate", f"{rate * 8:.0f}bit", "burst", str(burst), "limit", str(limit)]


def _remove(names: Sequence[str], grace_s: float = _GRACE_S) -> None:
    """End all processes in these namespaces, first by SIGTERM, and delete the namespaces."""

    def running() -> list[int]:
        return [pid for name in names for pid in _inside(name) if pid != os.getpid()]

    for number, within_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        for pid in running():
            _signal(pid, number)
        deadline = time.monotonic() + within_s
        while running() and time.monotonic() < deadline:
            time.sleep(0.05)
    for name in names:
        with suppress(LabError):
            _run("ip", "netns", "delete", name)
        shutil.rmtree(_ETC / name, ignore_errors=True)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _inside(name: str) -> list[int]:
    """Return the ids of the processes in a namespace."""
    try:
        return [int(word) for word in _run("ip", "netns", "pids", name).split()]
    except LabError:  # it is gone
        return []


def _names() -> list[str]:
    return sorted({path.name for folder in (_NAMESPACES, _ETC) for path in folder.glob(f"{_PREFIX}*")})


_labs = 0


def _next_number() -> int:
    global _labs
    _labs += 1
    return _labs


def _me() -> str:
    return f"{os.getpid()}.{_start_ticks(os.getpid())}"


def _start_ticks(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _begin(name: str) -> None:
    """Prepare a child process: set its host name, and have it terminated when its parent dies."""
    _set_host_name(name)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PATH": _PATH})
    if done.returncode:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
