"""What answers on the port that `coli serve` would take."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing, suppress

from colibri.lab.doctor.finding import Finding, fault, fine, note
from colibri.settings import Settings

_WAIT_S = 1.0


def check_port(settings: Settings) -> Finding:
    """Free, taken by a server of ours, or by another program."""
    where = f"{settings.host}:{settings.port}"
    if settings.port == 0 or not _is_taken(settings.host, settings.port):
        return fine("port", f"{where} is free", taken=False)
    health = _health(settings.host, settings.port)
    if health is not None:
        return note(
            "port",
            f"a server of Colibri answers at {where}: {health}",
            "a second one needs another port; `coli chat --attach` talks to this one",
            f"coli chat --attach http://{where}",
            taken=True,
        )
    return fault(
        "port",
        f"another program has {where}",
        "`coli serve` cannot start there",
        "coli serve --port 0, or another port",
        taken=True,
    )


def _is_taken(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), _WAIT_S):
        return True
    return False


def _health(host: str, port: int) -> str | None:
    """What `/health` says, where it is ours."""
    connection = http.client.HTTPConnection(host, port, timeout=_WAIT_S)
    with closing(connection), suppress(OSError, http.client.HTTPException, ValueError):
        connection.request("GET", "/health")
        told = json.loads(connection.getresponse().read(1 << 16))
        if isinstance(told, dict) and told.keys() >= {"status", "ready", "in_flight"}:
            return str(told["status"])
    return None
