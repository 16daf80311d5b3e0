"""Ceph as the S3 server: one monitor, one disk in a file, one gateway, no copies; a real S3, for one machine.

Every daemon is bound to its address explicitly: by default they listen on all.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from infra.deploy.stack.buckets import create_buckets, keys_work
from infra.deploy.stack.credentials import write_private
from infra.deploy.stack.probes import answers, listens
from infra.deploy.stack.service import Port, Service, StackError
from infra.deploy.stack.site import LOOPBACK, S3_PROFILE, Site, program
from infra.settings import child_environment

TIMEOUT_S = 120.0
KEYS = {
    "mon.": ["mon", "allow *"],
    "client.admin": ["mon", "allow *", "osd", "allow *"],
    "osd.0": ["mon", "allow profile osd", "osd", "allow *"],
    "client.rgw": ["mon", "allow rw", "osd", "allow rwx"],
}
CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v2:{loopback}:{monitor_port}]
public addr = {loopback}
cluster addr = {loopback}
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {folder}/$name.keyring
run dir = {folder}
admin socket =
pid file =
log to file = false
log to stderr = true
err to stderr = true
mon cluster log to file = false
debug rgw = 0
debug rocksdb = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail warn = 2
mon data avail crit = 1
paxos propose interval = 0.05
paxos min wait = 0.02
[mon.a]
mon data = {folder}/mon
public addrv = [v2:{loopback}:{monitor_port}]
[osd.0]
osd data = {folder}/osd
osd objectstore = bluestore
osd memory target = 939524096
bluestore block size = {bytes}
bluestore cache autotune = false
bluestore cache size = 134217728
[client.rgw]
rgw frontends = beast endpoint={host}:{s3_port}
rgw thread pool size = 64
rgw enable usage log = false
"""


def monitor(site: Site) -> Service:
    """Knows where everything is."""
    port = site.settings.monitor_port
    return Service(
        name="ceph-mon",
        address=f"{LOOPBACK}:{port}",
        ports=[Port(LOOPBACK, port, "MONITOR_PORT")],
        command=_daemon(site, "ceph-mon", "-i", "a"),
        folder=site.folder("ceph"),
        prepare=lambda: _prepare_monitor(site),
        healthy=lambda: listens(LOOPBACK, port),
    )


def disk(site: Site) -> Service:
    """Holds the objects, in one sparse file."""
    return Service(
        name="ceph-osd",
        address=LOOPBACK,
        after=["ceph-mon"],
        command=_daemon(site, "ceph-osd", "-i", "0"),
        folder=site.folder("ceph"),
        prepare=lambda: _prepare_disk(site),
        healthy=lambda: _is_up(site),
    )


def gateway(site: Site) -> Service:
    """Speaks S3. It waits by itself until the disk is there."""
    return Service(
        name="s3",
        address=f"http://{site.host}:{site.settings.s3_port}",
        ports=[Port(site.host, site.settings.s3_port, "S3_PORT")],
        after=["ceph-mon"],
        command=_daemon(site, "radosgw", "-n", "client.rgw"),
        folder=site.folder("ceph"),
        healthy=lambda: answers(f"http://{site.host}:{site.settings.s3_port}/"),
        furnish=lambda: _furnish(site),
    )


def _prepare_monitor(site: Site) -> None:
    folder = site.folder("ceph")
    identity = folder / "fsid"
    if not identity.exists():
        write_private(identity, str(uuid.uuid4()))
    fsid = identity.read_text()
    settings = site.settings
    configuration = CONFIGURATION.format(
        fsid=fsid,
        loopback=LOOPBACK,
        host=site.host,
        folder=folder,
        monitor_port=settings.monitor_port,
        s3_port=settings.s3_port,
        bytes=settings.s3_gib * 2**30,
    )
    write_private(_configuration(site), configuration)
    # The monitor remembers its own address in this map, so it gets a new one each time: the port is a setting.
    address = ["--addv", "a", f"[v2:{LOOPBACK}:{settings.monitor_port}]"]
    _call(site, "monmaptool", "--create", "--clobber", "--fsid", fsid, *address, "monmap")
    if (folder / "mon").exists():
        _call(site, *_daemon(site, "ceph-mon", "-i", "a", foreground=False), "--inject-monmap", "monmap")
        return
    _make_keys(site)
    beside = folder / "mon.new"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    make = [*_daemon(site, "ceph-mon", "-i", "a", foreground=False), "--mkfs", "--mon-data", str(beside)]
    _call(site, *make, "--monmap", "monmap", "--keyring", "keyring")
    beside.rename(folder / "mon")


def _make_keys(site: Site) -> None:
    """A key for each daemon in a file of its own, and all of them in the one that the monitor learns them from."""
    folder = site.folder("ceph")
    together = ""
    for name, rights in KEYS.items():
        path = folder / f"{name}.keyring"
        caps = [part for pair in zip(rights[::2], rights[1::2], strict=True) for part in ("--cap", *pair)]
        _call(site, "ceph-authtool", "-C", str(path), "--gen-key", "-n", name, *caps)
        together += path.read_text()
    write_private(folder / "keyring", together)


def _prepare_disk(site: Site) -> None:
    folder = site.folder("ceph")
    if (folder / "osd").exists():
        return
    identity = folder / "osd-fsid"
    if not identity.exists():
        write_private(identity, str(uuid.uuid4()))
    # The same identity gets the same number again, so a start that was cut off here can be repeated.
    _call(site, "ceph", "--conf", str(_configuration(site)), "osd", "new", identity.read_text(), "0")
    beside = folder / "osd.new"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    make = [*_daemon(site, "ceph-osd", "-i", "0", foreground=False), "--mkfs", "--osd-uuid", identity.read_text()]
    _call(site, *make, "--osd-data", str(beside))
    beside.rename(folder / "osd")


def _is_up(site: Site) -> bool:
    command = ["ceph", "--conf", str(_configuration(site)), "--connect-timeout", "5", "osd", "stat", "-f", "json"]
    try:
        return bool(json.loads(_call(site, *command))["num_up_osds"] == 1)
    except StackError:
        return False


def _furnish(site: Site) -> None:
    """The S3 user with our keys, and the buckets."""
    if not keys_work(site):
        admin = ["radosgw-admin", "-c", str(_configuration(site)), "-n", "client.rgw"]
        user = f"user:{S3_PROFILE}"
        try:
            found = json.loads(_call(site, *admin, "metadata", "get", user))
        except StackError:
            _call(site, *admin, "user", "create", "--uid", S3_PROFILE, "--display-name", S3_PROFILE)
            found = json.loads(_call(site, *admin, "metadata", "get", user))
        keys = {"access_key": site.credentials.s3_access_key, "secret_key": site.credentials.s3_secret_key}
        found["data"]["keys"] = [{"user": S3_PROFILE, **keys}]
        # By stdin: `user create --secret-key` would show them to everyone who lists processes.
        _call(site, *admin, "metadata", "put", user, given=json.dumps(found))
    create_buckets(site)


def _configuration(site: Site) -> Path:
    return site.folder("ceph") / "ceph.conf"


def _daemon(site: Site, name: str, *identity: str, foreground: bool = True) -> list[str]:
    command = [program(name) or name, "-c", str(_configuration(site)), *identity]
    return [*command, "-f"] if foreground else command


def _call(site: Site, *command: str, given: str = "") -> str:
    """What a program of Ceph's says; its complaints are shown when it fails."""
    done = subprocess.run(
        [program(command[0]) or command[0], *command[1:]],
        cwd=site.folder("ceph"),
        env=child_environment({}, without=site.hidden()),
        umask=0o077,
        input=given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise StackError(f"{_spoken(command)} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _spoken(command: Sequence[str]) -> str:
    return " ".join(Path(part).name if part.startswith("/") else part for part in command)
