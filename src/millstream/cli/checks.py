"""What `millstream doctor` looks at: each check answers with what it found and what to do about it."""

from __future__ import annotations

import datetime
import os
import platform
import re
import resource
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from millstream.cli.connection import open_client
from millstream.cli.output import bytes_text, duration_text, plural
from millstream.errors import (
    ConnectionLost,
    Forbidden,
    MillstreamError,
    NewerData,
    RequestTimeout,
    StartFailed,
    Unauthorized,
)
from millstream.names import DEFAULT_NAMESPACE
from millstream.version import VERSION

if TYPE_CHECKING:
    from millstream.client import Client
    from millstream.config import Settings

__all__ = ["Check", "check_broker", "check_data", "check_machine", "check_ports", "check_security", "expiry_of"]

Verdict = Literal["ok", "warn", "fail"]

_PYTHON_MIN: Final = (3, 11)
_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)")
#: Where an fsync does not mean what it should, or the data does not outlive the machine.
_DOUBTFUL: Final = {
    "tmpfs": "this is memory: everything is gone after a restart of the machine",
    "ramfs": "this is memory: everything is gone after a restart of the machine",
    "overlay": "this is a layer of a container, which is gone with it",
    "nfs": "an fsync over the network is slow, and locks may not be kept",
    "nfs4": "an fsync over the network is slow, and locks may not be kept",
    "cifs": "an fsync over the network is slow, and locks may not be kept",
    "fuse.sshfs": "an fsync over the network is slow, and locks may not be kept",
}
_SYNCS: Final = 8
_SYNC_SLOW_MS: Final = 20.0
#: No disk is that fast: somebody keeps the bytes in memory and says that they are safe.
_SYNC_TOO_FAST_MS: Final = 0.005
_EXPIRES_SOON_DAYS: Final = 21
_CLOCK_OFF_MS: Final = 1000
_BROKER_TIMEOUT_S: Final = 5.0
#: Of a limit.
_NEARLY_FULL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    verdict: Verdict
    found: str
    #: What to do; empty when there is nothing to do.
    next: str = ""


# --- this machine ------------------------------------------------------------------------------------------------


def check_machine(settings: Settings) -> Iterator[Check]:
    """Python, packages and limits."""
    version = platform.python_version()
    if sys.version_info < _PYTHON_MIN:
        yield Check("python", "fail", version, "Install Python 3.11 or later.")
    else:
        yield Check("python", "ok", f"{version}, millstream {VERSION}")
    yield _check_packages()
    needed = settings.descriptors_needed
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield Check(
            "open files",
            "warn",
            f"{hard:,} allowed, {needed:,} wanted for {settings.server.max_connections:,} connections",
            "Raise `ulimit -Hn` (LimitNOFILE= in systemd), or lower server.max_connections.",
        )
    else:
        yield Check("open files", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} allowed")


def _check_packages() -> Check:
    try:
        wanted = metadata.requires("millstream") or []
    except metadata.PackageNotFoundError:
        return Check("packages", "warn", "millstream was not installed as a package", "Install it with pip.")
    problems, count = [], 0
    for requirement in wanted:
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, least = match[1], match[2]
        count += 1
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if _numbers(there) < _numbers(least):
            problems.append(f"{name} is {there}, at least {least} is needed")
    if problems:
        return Check("packages", "fail", "; ".join(problems), "pip install -r requirements.txt")
    return Check("packages", "ok", f"all {count} are there")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


# --- the data directory ------------------------------------------------------------------------------------------


def check_data(settings: Settings) -> Iterator[Check]:
    """Whether a broker could work there, and how fast its disk is."""
    data = Path(settings.storage.data)
    there = data
    while not there.exists() and there.parent != there:
        there = there.parent
    if not data.exists():
        if os.access(there, os.W_OK | os.X_OK):
            yield Check("data directory", "ok", f"{data} does not exist yet; the broker will make it")
        else:
            yield Check(
                "data directory", "fail", f"{data} cannot be made", f"Let {_user()} write to {there}, or set --data."
            )
            return
    elif not data.is_dir():
        yield Check("data directory", "fail", f"{data} is a file, not a directory", "Set --data elsewhere.")
        return
    elif not os.access(data, os.R_OK | os.W_OK | os.X_OK):
        yield Check(
            "data directory",
            "fail",
            f"{data} cannot be written",
            f"Let {_user()} write there, or set --data elsewhere.",
        )
        return
    else:
        yield _check_contents(data)
    yield _check_room(settings, there)
    yield _check_file_system(there)
    yield _check_sync(there)


def _check_contents(data: Path) -> Check:
    from millstream.broker.node import check_data as check_start
    from millstream.log.holding import files_below
    from millstream.log.storage import DiskStorage

    allowed = f"Let {_user()} read and write everything in {data}."
    try:
        paths = files_below(str(data))
    except OSError as error:
        found = f"{error.filename or data} cannot be read: {error.strerror or error}"
        return Check("data directory", "fail", found, allowed)
    closed = [path for path in paths if not os.access(data / path, os.R_OK | os.W_OK) and (data / path).exists()]
    if closed:
        more = f", nor {plural(len(closed) - 1, 'other file')}" if closed[1:] else ""
        return Check("data directory", "fail", f"{data / closed[0]} cannot be read and written{more}", allowed)
    try:
        check_start(DiskStorage(data))
    except NewerData as error:
        return Check("data directory", "fail", f"{data}: {error}", 'See "Upgrade" in docs/guide/operate.md.')
    except StartFailed as error:
        return Check("data directory", "fail", f"{data}: {error}", 'See "Backup and restore" in docs/guide/operate.md.')
    return Check("data directory", "ok", f"{data.absolute()}, {_holder(data)}")


def _user() -> str:
    return f"user {os.getuid()}"


def lock_holder(data: Path) -> int | None:
    """The process that uses a data directory; 0 when it is not known which."""
    import fcntl

    try:
        with open(data / "lock", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read(32).strip()
                return int(text) if text.isdigit() else 0
    except OSError:
        return None
    return None


def _holder(data: Path) -> str:
    holder = lock_holder(data)
    return "not in use" if holder is None else f"in use by process {holder or 'unknown'}"


def _check_room(settings: Settings, there: Path) -> Check:
    room = os.statvfs(there)
    free, least = room.f_bavail * room.f_frsize, settings.storage.free_bytes_min
    found = f"{bytes_text(free)} free"
    if free < least:
        return Check(
            "disk space",
            "fail",
            f"{found}, below {bytes_text(least)}: the broker is read-only",
            "Make room on the disk.",
        )
    if free < 4 * least or (room.f_favail and room.f_favail < 10_000):
        return Check("disk space", "warn", f"{found}, {room.f_favail:,} files", "Make room, or shorten retention.")
    return Check("disk space", "ok", found)


def _check_file_system(there: Path) -> Check:
    kind = file_system_of(there)
    if kind in _DOUBTFUL:
        return Check("file system", "warn", f"{kind}: {_DOUBTFUL[kind]}", "Keep data on a disk of this machine.")
    return Check("file system", "ok", kind or "unknown")


def file_system_of(path: Path) -> str:
    """Which kind of file system holds a path, as Linux calls it; empty when it cannot be found out."""
    best, kind = "", ""
    with suppress(OSError):
        here = f"{path.resolve()}/"
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mount, its_kind, *_ = line.split(" ")
            mount = mount.replace("\\040", " ").rstrip("/") + "/"
            if here.startswith(mount) and len(mount) >= len(best):
                best, kind = mount, its_kind
    return kind


def _check_sync(there: Path) -> Check:
    try:
        times_ms = measure_syncs(there)
    except OSError as error:
        return Check("fsync", "fail", f"cannot be measured: {error.strerror}", "Look at the disk.")
    median = statistics.median(times_ms)
    found = f"{median:.2f} ms (slowest of {len(times_ms)}: {max(times_ms):.2f} ms)"
    if median > _SYNC_SLOW_MS:
        return Check("fsync", "warn", found, "A publish waits that long: use a faster disk, or fsync=interval.")
    if median < _SYNC_TOO_FAST_MS:
        return Check("fsync", "warn", found, "No disk is that fast: a power cut may take what was confirmed.")
    return Check("fsync", "ok", found)


def measure_syncs(directory: Path) -> list[float]:
    """How long a few fdatasyncs take, in milliseconds."""
    times = []
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    return times


# --- ports and safety --------------------------------------------------------------------------------------------


def check_ports(settings: Settings, *, broker_runs: bool) -> Iterator[Check]:
    ports = [("port", settings.server.port, "--port")]
    if settings.http.enabled:
        ports.append(("HTTP port", settings.http.port, "--http-port"))
    if settings.mqtt.enabled:
        ports.append(("MQTT port", settings.mqtt.port, "--mqtt-port"))
    for name, port, flag in ports:
        where = f"{settings.server.host}:{port}"
        problem = _bind_problem(settings.server.host, port)
        if problem is None:
            yield Check(name, "ok", f"{where} is free")
        elif broker_runs:
            yield Check(name, "ok", f"{where} is held by the broker")
        else:
            advice = f"Stop what listens there, or choose another {flag}; if it is your broker, say its --data."
            yield Check(name, "fail", f"{where}: {problem}", advice)


def _bind_problem(host: str, port: int) -> str | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_security(settings: Settings) -> Iterator[Check]:
    """What a start would refuse, and what will be refused soon."""
    from millstream.server.exposure import check_exposure
    from millstream.server.tls import ServerTls

    try:
        check_exposure(settings)
    except StartFailed as error:
        yield Check("exposure", "fail", str(error), "See docs/guide/access.md.")
    else:
        if settings.is_public and settings.access.insecure:
            yield Check("exposure", "warn", f"{settings.server.host} is open to others", "Use keys and TLS instead.")
        else:
            yield Check("exposure", "ok", "other machines" if settings.is_public else "this machine only")
    if settings.tls.certificate:
        try:
            ServerTls(settings.tls)
            yield _check_expiry(settings.tls.certificate)
        except (StartFailed, ValueError, OSError) as error:
            yield Check("certificate", "fail", str(error), "Check tls.certificate and tls.key.")
    if settings.needs_keys:
        logs = list(Path(settings.storage.data).glob("state/access/*.log"))
        if any(log.stat().st_size for log in logs):
            yield Check("keys", "ok", "clients need a key, and there are keys")
        else:
            yield Check(
                "keys",
                "fail",
                "clients need a key, and there is none",
                f"millstream key create --role admin --data {settings.storage.data}",
            )


def _check_expiry(path: str) -> Check:
    expires = expiry_of(Path(path).read_text(encoding="ascii", errors="replace"))
    left = expires - datetime.datetime.now(datetime.UTC)
    found = f"valid until {expires:%Y-%m-%d}"
    if left.total_seconds() <= 0:
        return Check("certificate", "fail", f"expired on {expires:%Y-%m-%d}", "Replace it, then send SIGHUP.")
    if left.days < _EXPIRES_SOON_DAYS:
        return Check("certificate", "warn", f"{found}, {left.days} days", "Replace it, then send SIGHUP.")
    return Check("certificate", "ok", f"{found}, {left.days} days")


def expiry_of(pem: str) -> datetime.datetime:
    """When the first certificate of a PEM file ends.  Raises ValueError when there is none.

    The standard library reads certificates of others only, so this walks to the one field it wants: certificate,
    then what is signed, then (behind version, number, algorithm and issuer) the second time of the validity.
    """
    found = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", pem, re.S)
    if found is None:
        raise ValueError("there is no certificate in the file")
    try:
        signed = next(_elements(next(_elements(ssl.PEM_cert_to_DER_cert(found[0])))[1]))[1]
        fields = [element for element in _elements(signed) if element[0] != 0xA0]
        _, (tag, text) = _elements(fields[3][1])
        form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
        return datetime.datetime.strptime(text.decode("ascii"), form).replace(tzinfo=datetime.UTC)
    except (IndexError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError("the certificate cannot be read") from error


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element of a DER sequence."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            width = length & 0x7F
            length = int.from_bytes(data[at : at + width], "big")
            at += width
        yield tag, data[at : at + length]
        at += length


# --- a broker that runs ------------------------------------------------------------------------------------------


def check_broker(address: str, *, in_use: bool) -> Iterator[Check]:
    """Ask a broker how it is.  That none answers is a failure only if one should: `in_use`."""
    try:
        with open_client(address, DEFAULT_NAMESPACE, timeout_s=_BROKER_TIMEOUT_S) as client:
            asked_ms = time.time() * 1000
            report = client.admin.health(deep=True)
            answered_ms = time.time() * 1000
            try:
                about = client.broker()
            except (Unauthorized, Forbidden):
                about = {}
            mqtt = _check_mqtt(client)
    except (ConnectionLost, RequestTimeout) as error:
        if in_use:
            yield Check(
                "broker", "fail", str(error), "A process uses the data directory: say --broker, look at its log."
            )
        else:
            yield Check("broker", "ok", f"none at {address}", "Start one with `millstream serve`.")
        return
    except (Unauthorized, Forbidden) as error:
        lacking = "Use a key with the role read" if isinstance(error, Forbidden) else "Set MILLSTREAM_KEY"
        yield Check("broker", "warn", f"{address}: {error}", f"{lacking} to see more.")
        return
    except MillstreamError as error:
        yield Check("broker", "fail", f"{address}: {error}", error.remedy)
        return
    software = str(about.get("software", "")).removeprefix("millstream ")
    up = f"up for {duration_text(report.uptime_ms)}"
    if software and software != VERSION:
        yield Check("broker", "warn", f"{address} is {software}, this is {VERSION}; {up}", "Use the same version.")
    else:
        yield Check("broker", "ok", f"{address}, {software or 'version not shown to this key'}; {up}")
    if mode := about.get("mode"):
        why = f": {about['reason']}" if about.get("reason") else ""
        verdict: Verdict = "ok" if mode == "normal" else "warn"
        yield Check("mode", verdict, f"{mode}{why}", "" if mode == "normal" else "See `millstream mode --help`.")
    for component in report.components:
        if component.status != "healthy":
            bad: Verdict = "fail" if component.status == "critical" else "warn"
            yield Check(f"health: {component.name}", bad, component.message, component.recommendation)
    if report.status == "healthy":
        yield Check(
            "health", "ok", f"{len(report.components)} components are healthy; a message was stored and read back"
        )
    if mqtt is not None:
        yield mqtt
    # The broker's clock was read between the two; what the way took is not the clock's fault.
    off_ms = max(asked_ms - report.checked_ms, report.checked_ms - answered_ms, 0)
    if off_ms > _CLOCK_OFF_MS:
        yield Check("clock", "warn", f"differs by {duration_text(int(off_ms))}", "Let both machines use NTP.")
    else:
        yield Check("clock", "ok", f"differs by less than {_CLOCK_OFF_MS} ms")


def _check_mqtt(client: Client) -> Check | None:
    """Whether what MQTT clients leave behind still has room.  Nothing if this key may not know."""
    try:
        found = client.mqtt.overview(everywhere=True)
    except MillstreamError:
        return None
    said = f"{found.connected:,} connected, {found.sessions:,} sessions, {found.retained:,} retained messages"
    for name, amount, most in (
        ("mqtt.sessions_max", found.sessions, found.sessions_max),
        ("mqtt.retained_max", found.retained, found.retained_max),
        ("mqtt.retained_bytes_max", found.retained_bytes, found.retained_bytes_max),
    ):
        if most and amount >= most * _NEARLY_FULL:
            next_step = "See `millstream mqtt sessions --away` and `millstream mqtt retained`, or raise the limit."
            return Check("mqtt", "warn", f"{said}; {amount:,} of {name} = {most:,}", next_step)
    return Check("mqtt", "ok", said)
