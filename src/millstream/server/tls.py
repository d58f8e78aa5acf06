"""TLS for every port: one context, whose certificate can be replaced while it is in use."""

from __future__ import annotations

import ssl
from pathlib import Path

import structlog

from millstream.config import TlsSettings
from millstream.errors import StartFailed

__all__ = ["ServerTls"]

_log = structlog.get_logger("millstream.tls")


class ServerTls:
    """What listeners need; `context` is None when there is no certificate."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self.context: ssl.SSLContext | None = None
        if not settings.certificate:
            if settings.key or settings.client_ca:
                raise StartFailed("tls.key and tls.client_ca mean nothing without tls.certificate")
            return
        self.context = self._made()

    def reload(self) -> None:
        """Take up new files; connections from now on get them.  If they are no good, the old ones stay."""
        if self.context is None:
            _log.info("nothing was read again: there is no certificate, and settings are read at the start only")
            return
        try:
            self._made()  # first aside: a half-written file must not end up in the context that is in use
            self._load(self.context)
        except StartFailed as error:
            _log.error("the certificate was not replaced", reason=str(error))
        else:
            _log.info("the certificate was read again", certificate=self._settings.certificate)

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        settings = self._settings
        for name in ("certificate", "key", "client_ca"):
            path = getattr(settings, name)
            if path and not Path(path).is_file():
                raise StartFailed(f"tls.{name}: there is no file {path!r}")
        try:
            # Without a password it would ask at the terminal, and wait.
            context.load_cert_chain(settings.certificate, settings.key or None, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as problem:
            raise StartFailed(
                f"tls.certificate {settings.certificate!r} and its key cannot be used: {_said(problem)}"
            ) from None
        if settings.client_ca:
            try:
                context.load_verify_locations(settings.client_ca)
            except (ssl.SSLError, OSError, ValueError) as problem:
                raise StartFailed(f"tls.client_ca {settings.client_ca!r} cannot be used: {_said(problem)}") from None
            context.verify_mode = ssl.CERT_REQUIRED


def _said(problem: Exception) -> str:
    reason = getattr(problem, "reason", None) or getattr(problem, "strerror", None)
    text = str(reason or problem)
    # All that OpenSSL says about either.
    return "one of them is not PEM, is missing, or has a password" if "PEM lib" in text else text
