"""Start the page's server: choose the address, the port and the token."""

import ipaddress
import re
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

from eigentrace.errors import BusyError, InputError
from eigentrace.page.access import REQUEST_SECONDS, hosts_of, is_wildcard
from eigentrace.page.app import make_app

if TYPE_CHECKING:
    from fastapi import FastAPI

DEFAULT_PORT = 8765
_LEAST_TOKEN = 16


@dataclass(frozen=True)
class Place:
    """The address of a page."""

    url: str
    """The URL to open; it contains the token if other machines can reach the page."""
    is_open: bool
    """Whether other machines can reach the page."""


def run_server(
    run: str | Path,
    *,
    port: int = DEFAULT_PORT,
    host: str = "127.0.0.1",
    token: str | None = None,
    allow_hosts: Sequence[str] = (),
    request_seconds: float = REQUEST_SECONDS,
    with_model: bool = False,
    trust: bool = False,
    open_browser: bool = False,
    on_start: Callable[[Place], None] = lambda place: None,
) -> None:
    """Serve the page on a run until the process is interrupted.

    Args:
        run: The run's directory.
        port: The port to listen on; 0 for any free port.
        host: The address to listen on. If other machines can reach it, reading requires the token as well.
        token: The token that writing requires; random by default, but required if other machines can reach the host.
        allow_hosts: Further names that the page is opened at, such as that of a reverse proxy, with a port or without.
        request_seconds: Time in which the headers of a request, and then its body, must arrive.
        with_model: Load the model as well, so that new examples can be explained.
        trust: Call the function that the run names to load its model and data; see `eigentrace.loading.trust`.
        open_browser: Open the page in the browser.
        on_start: Called with the page's address once it can be opened.
    """
    _check_uvicorn()
    is_local = _is_local(host)
    token = _checked_token(token, host, is_local)
    _check_names(allow_hosts)
    listener = _bound(host, port)
    port = listener.getsockname()[1]
    with listener:
        app = make_app(
            run,
            token=token,
            hosts=hosts_of(host, port, allow_hosts),
            with_model=with_model,
            trust=trust,
            closed=not is_local,
            own_address=is_wildcard(host),
            seconds=request_seconds,
        )
        name = socket.gethostname() if is_wildcard(host) else f"[{host}]" if ":" in host else host
        place = Place(f"http://{name}:{port}/" + ("" if is_local else f"?token={token}"), not is_local)
        listener.listen()  # from now on connections wait until the server accepts them
        on_start(place)
        if open_browser:
            Timer(0.0, webbrowser.open, [place.url]).start()
        _run(app, listener, request_seconds)


def _check_uvicorn() -> None:
    if find_spec("uvicorn") is None:
        raise InputError(
            'The page needs the package uvicorn, which is not installed. In the clone: pip install -e ".[serve]"'
        )


def _run(app: "FastAPI", listener: socket.socket, seconds: float) -> None:
    """Answer requests on a socket that listens, until the process is interrupted."""
    import uvicorn

    from eigentrace.page.connection import Connection

    config = uvicorn.Config(
        app,
        http=partial(Connection, seconds=seconds),  # type: ignore[arg-type]  # called like the class
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[listener])


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_token(token: str | None, host: str, is_local: bool) -> str:
    if token is None:
        if not is_local:
            raise InputError(
                f"Other machines can reach {host}, and the page shows the data. Set --token (at least {_LEAST_TOKEN} "
                f"characters, for instance {secrets.token_urlsafe(18)}), or listen on 127.0.0.1."
            )
        return secrets.token_urlsafe(24)
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
        raise InputError(
            f"The token is too short or contains other characters. Use at least {_LEAST_TOKEN} ASCII letters, digits, "
            "- or _."
        )
    return token


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?", name) is None:
            raise InputError(
                f"{name!r} is not the name of a host. Pass what an address has between // and the next /, such as "
                "data.example.org or data.example.org:8443."
            )


def _bound(host: str, port: int) -> socket.socket:
    """Bind the port before the run is read, so that a port in use is reported at once."""
    if not 0 <= port <= 65535:
        raise InputError(f"port must be 0 to 65535, got {port}.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(
            f"There is no address {host!r} to listen on ({error}). Use an address of this machine, such as 127.0.0.1."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise BusyError(
            f"Cannot listen on {host}:{port} ({error.strerror}): another page may be using it. Choose another port, or "
            "0 for any free port."
        ) from None
    return listener
