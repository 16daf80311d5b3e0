"""Which sockets the processes of a run take connections or datagrams on, looked at all the time that it runs."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.05
LOOK_AGAIN = 10
TRIES = 3
"""After so many looks for its owner a socket is another program's, until all is looked at again."""
LISTENING = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # 07 of UDP: open to whoever sends
ELSEWHERE = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "192.0.2.7"}
"""The user's own choice of interfaces, which is for other programs: all processes of an engine are on one machine."""
Address = IPv4Address | IPv6Address


@dataclass(frozen=True, order=True)
class OpenSocket:
    """One that a stranger can talk to, and the program that has it."""

    kind: str
    address: str
    port: int
    program: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        found = ip_address(self.address)
        mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
        return (mapped or found).is_loopback


@dataclass
class SocketWatch:
    """Collects what a process and all below it listen on, until `stop`."""

    process: subprocess.Popen[str]
    seen: set[OpenSocket] = field(default_factory=set)
    looks: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    known: set[str] = field(default_factory=set)
    others: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._watch, daemon=True, name="socket-watch")
        self.thread.start()

    def stop(self) -> set[OpenSocket]:
        """All that was seen."""
        self.ended.set()
        self.thread.join()
        return self.seen

    def _watch(self) -> None:
        while not self.ended.wait(LOOK_EVERY_S):
            self.looks += 1
            if self.looks % LOOK_AGAIN == 0:  # who handed a socket on may have been seen with it, and not who got it
                self.known.clear()
                self.others.clear()
            new = {inode: where for inode, where in listening() if self._is_new(inode)}
            if not new:
                continue
            owners = dict(self._owners())
            for inode, (kind, address, port) in new.items():
                if inode in owners:
                    self.seen.add(OpenSocket(kind, str(address), port, owners[inode]))
                    self.known.add(inode)
                else:
                    self.others[inode] += 1

    def _is_new(self, inode: str) -> bool:
        return inode not in self.known and self.others[inode] < TRIES

    def _owners(self) -> Iterator[tuple[str, str]]:
        """The inode of each socket that the tree has, with the command that has it."""
        try:
            main = psutil.Process(self.process.pid)
            tree = [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for one in tree:
            try:
                command = " ".join(one.cmdline())
                descriptors = list(Path(f"/proc/{one.pid}/fd").iterdir())
            except (OSError, psutil.Error):
                continue
            for descriptor in descriptors:
                with suppress(OSError):  # it is closed meanwhile
                    if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                        yield found[1], command


def listening() -> Iterator[tuple[str, tuple[str, Address, int]]]:
    """Every such socket of this machine: its inode, its protocol, its address and its port."""
    for kind, state in LISTENING.items():
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state:
                number, port = words[1].split(":")
                yield words[9], (kind, address_of(number), int(port, 16))


def address_of(number: str) -> Address:
    """The kernel writes addresses as words of four bytes in the machine's own order."""
    content = b"".join(bytes.fromhex(number[start : start + 8])[::-1] for start in range(0, len(number), 8))
    return ip_address(content)
