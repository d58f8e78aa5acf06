"""The life of the process: lock the data, recover, listen, and on SIGTERM drain and leave everything on disk."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import structlog

from millstream.broker.broker import Broker
from millstream.clock import SystemClock
from millstream.config import Settings
from millstream.errors import StartFailed
from millstream.log.lock import DirectoryLock
from millstream.log.storage import DiskStorage, make_data_directory
from millstream.server.exposure import check_exposure, check_keys
from millstream.server.hangup import Hangup
from millstream.server.http.listener import HttpListener
from millstream.server.logs import set_log_level
from millstream.server.mqtt.listener import MqttListener
from millstream.server.stalls import Stalls
from millstream.server.tcp import NativeListener
from millstream.server.tls import ServerTls
from millstream.server.turns import take_short_turns

__all__ = ["offline", "run", "serve"]

_log = structlog.get_logger("millstream.server")

T = TypeVar("T")
#: Gets the address of the native port, and the URLs of HTTP and MQTT, empty where they are switched off.
Announce = Callable[[str, str, str], None]


async def run(
    settings: Settings,
    announce: Announce,
    stop: asyncio.Event | None = None,
    *,
    sources: Mapping[str, str] | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or `stop`; `announce` is called once the broker listens.

    `sources` says of each setting where it came from.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    check_exposure(settings)
    tls = ServerTls(settings.tls)
    loop.add_signal_handler(signal.SIGHUP, Hangup(tls, stop.set, loop.call_later))
    data = Path(settings.storage.data)
    _raise_descriptor_limit(settings)
    lock = _lock(data)
    try:
        clock = SystemClock()
        broker = Broker(settings, DiskStorage(data), clock=clock)
        broker.setting_sources = sources or {}
        broker.on_log_level = set_log_level
        await broker.start()
        awake_us = settings.server.stay_awake_us
        listener = NativeListener(broker, settings, clock.monotonic_ms, tls.context, stay_awake_us=awake_us)
        http = HttpListener(broker, settings, tls.context) if settings.http.enabled else None
        mqtt = MqttListener(broker, settings, tls.context) if settings.mqtt.enabled else None
        stalls = Stalls(loop, clock.monotonic_ms)
        try:
            check_keys(settings, has_keys=broker.access.has_keys)
            await _open(listener.open, settings.server.host, settings.server.port, "--port")
            if http is not None:
                await _open(http.open, settings.server.host, settings.http.port, "--http-port")
            if mqtt is not None:
                await _open(mqtt.open, settings.server.host, settings.mqtt.port, "--mqtt-port")
            # What exists now lives as long as the process: the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 100)
            stalls.start()
            announce(listener.address, http.url if http is not None else "", mqtt.url if mqtt is not None else "")
            await stop.wait()
            _log.info("stopping", drain_ms=settings.server.drain_ms)
            await asyncio.gather(*(door.close() for door in (listener, http, mqtt) if door is not None))
        finally:
            stalls.stop()
            await broker.stop()
    finally:
        lock.release()
    _log.info("stopped")
    return 0


def serve(settings: Settings, announce: Announce, sources: Mapping[str, str] | None = None) -> int:
    """Run the broker on uvloop where there is one."""
    take_short_turns()
    serving = run(settings, announce, sources=sources)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serving)
    result: int = uvloop.run(serving)
    return result


async def offline(settings: Settings, work: Callable[[Broker], Awaitable[T]]) -> T:
    """Do something with the data of a broker that does not run, as it would do it itself, and nothing else."""
    data = Path(settings.storage.data)
    lock = _lock(data)
    try:
        broker = Broker(settings, DiskStorage(data), clock=SystemClock())
        await broker.start(quiet=True)
        try:
            return await work(broker)
        finally:
            await broker.stop()
    finally:
        lock.release()


def _lock(data: Path) -> DirectoryLock:
    try:
        make_data_directory(data)
        lock = DirectoryLock(data)
        lock.acquire()
    except (FileExistsError, NotADirectoryError):
        raise StartFailed(f"the data directory {str(data)!r} is or lies in a file; choose another --data") from None
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "let this user write there, or choose another --data"
        raise StartFailed(f"the data directory {str(data)!r} cannot be used: {reason}; {advice}") from None
    return lock


async def _open(opening: Callable[[], Awaitable[None]], host: str, port: int, flag: str) -> None:
    where = f"{host}:{port}"
    try:
        await opening()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"another process listens there; stop it or choose another {flag}"
        elif error.errno == errno.EACCES:
            reason = f"ports below 1024 need more rights; choose a higher {flag}"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = "this machine does not have that address; choose another --host"
        else:
            reason = error.strerror or str(error)
        raise StartFailed(f"cannot listen on {where}: {reason}") from None


def _raise_descriptor_limit(settings: Settings) -> None:
    """Take the descriptors that the settings need, or say which setting is too high for this machine."""
    needed = settings.descriptors_needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    target = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
    if target < needed:
        _log.warning(
            "few file descriptors: connections beyond the limit of the machine will fail",
            limit=target,
            wanted=needed,
            hint="raise `ulimit -n` or lower server.max_connections",
        )
