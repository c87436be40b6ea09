"""From settings to the server's parts."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from colibri.engine.messages import Loading
from colibri.errors import SettingsError
from colibri.llm.location import find_model
from colibri.llm.service import engine_service
from colibri.models.gguf import model_config
from colibri.models.registry import family_of
from colibri.server.running import Binding
from colibri.server.served_model import ServedModel
from colibri.server.serving import Limits, Serving
from colibri.settings import Settings

OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
ANY_HOST = "*"


def serving_of(
    settings: Settings, loading: Callable[[Loading], None] = lambda _loading: None
) -> Serving:
    """The server's parts; the engine is started when the server is.

    Raises:
        SettingsError: it would listen to strangers without a key.
        CheckpointError, TextError: the checkpoint's text side cannot be used.
    """
    check_exposure(settings)
    directory = find_model(settings)
    config = model_config(directory, settings.family)
    model = ServedModel.load(directory, settings.served_name, family_of(config).dialect)
    return Serving(
        model=model, engine=engine_service(settings, loading), limits=limits_of(settings)
    )


def binding_of(settings: Settings) -> Binding:
    """Where it listens."""
    return Binding(
        host=settings.host,
        port=settings.port,
        max_connections=settings.max_connections,
        drain_s=settings.drain,
    )


def limits_of(settings: Settings) -> Limits:
    """What clients may do.

    On this machine alone only its own names are allowed, so that no web page reaches the server
    under a name of its own; beyond it, names are many, and the key keeps pages out.
    """
    hosts = (*OWN_HOSTS, *settings.allowed_host)
    if ANY_HOST in hosts or not (is_loopback(settings.host) or settings.allowed_host):
        hosts = ()
    return Limits(
        api_key=settings.api_key,
        allowed_hosts=tuple(host.lower() for host in hosts),
        cors_origins=settings.cors_origin,
        max_body_bytes=settings.max_body,
    )


def check_exposure(settings: Settings) -> None:
    """Refuse to listen to strangers unless a key, or a flag, says so.

    Raises:
        SettingsError: neither is given.
    """
    if is_loopback(settings.host) or settings.api_key is not None or settings.expose:
        return
    raise SettingsError(
        f"host is {settings.host}: whoever can reach it could use this server; set api_key, or set "
        "expose to true where that is meant"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
