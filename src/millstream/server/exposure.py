"""Whether the broker may open its ports as it is set up: nobody exposes it to a network by accident."""

from __future__ import annotations

from millstream.config import Settings
from millstream.errors import StartFailed

__all__ = ["check_exposure", "check_keys"]


def check_exposure(settings: Settings) -> None:
    """Raises StartFailed when other machines could use the broker, or listen, without anybody having said so."""
    if not settings.is_public or settings.access.insecure:
        return
    host = settings.server.host
    if not settings.needs_keys:
        raise StartFailed(
            f"{host} can be reached from other machines and access.mode is {settings.access.mode}: set it to keys, "
            "listen on 127.0.0.1, or say --insecure to let everybody in"
        )
    if not settings.tls.certificate:
        raise StartFailed(
            f"{host} can be reached from other machines and there is no TLS: set tls.certificate and tls.key, listen "
            "on 127.0.0.1, or say --insecure (with access.mode=keys to ask for keys all the same)"
        )


def check_keys(settings: Settings, *, has_keys: bool) -> None:
    """Raises StartFailed when keys are asked for and nobody can have one."""
    if settings.needs_keys and not has_keys:
        raise StartFailed(
            "clients need a key and there is none yet: make the first one with "
            f"`millstream key create --role admin --data {settings.storage.data}`, then start the broker"
        )
