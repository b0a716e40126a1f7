"""Starting the server: a port that is free, a token, and who may reach it."""

import ipaddress
import secrets
import socket
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from eigentrace.errors import BusyError, InputError
from eigentrace.page.access import hosts_of
from eigentrace.page.app import make_app

DEFAULT_PORT = 8765
_LEAST_TOKEN = 16


@dataclass(frozen=True)
class Place:
    """Where a page is."""

    url: str
    """What to open; beyond this machine it carries the token."""
    is_open: bool
    """Whether others than this machine can reach it."""


def run_server(
    run: str | Path,
    *,
    port: int = DEFAULT_PORT,
    host: str = "127.0.0.1",
    token: str | None = None,
    with_model: bool = False,
    open_browser: bool = False,
    on_start: Callable[[Place], None] = lambda place: None,
) -> None:
    """Serve a page on a run until the process is told to end.

    Args:
        run: The run's directory.
        port: Where to listen; 0 for any that is free.
        host: Which address to listen on. Beyond this machine, reading needs the token too.
        token: What writing needs; drawn at random if not given, which a host beyond this machine does not allow.
        with_model: Load the model as well, so that new examples can be asked about.
        open_browser: Open the page in the browser.
        on_start: Called when the page can be opened.
    """
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise InputError(
            'The page needs the package uvicorn, which is not installed. In the clone: pip install -e ".[serve]"'
        ) from None
    is_local = _is_local(host)
    token = _checked(token, host, is_local)
    taken = _bound(host, port)
    port = taken.getsockname()[1]
    with taken:
        hosts = hosts_of(host, port)
        app = make_app(run, token=token, hosts=hosts, with_model=with_model, closed=not is_local)
        name = f"[{host}]" if ":" in host else host
        place = Place(f"http://{name}:{port}/" + ("" if is_local else f"?token={token}"), not is_local)
        taken.listen()  # from now on connections wait until the server takes them
        on_start(place)
        if open_browser:
            Timer(0.0, webbrowser.open, [place.url]).start()
        uvicorn.Server(
            uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=3
            )
        ).run(sockets=[taken])


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked(token: str | None, host: str, is_local: bool) -> str:
    if token is None:
        if not is_local:
            raise InputError(
                f"Others can reach {host}, and the page shows the data: say with --token what they need to know (at "
                f"least {_LEAST_TOKEN} letters, for instance {secrets.token_urlsafe(18)}), or listen on 127.0.0.1."
            )
        return secrets.token_urlsafe(24)
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"A token has at least {_LEAST_TOKEN} letters, digits, - or _; the one given does not.")
    return token


def _bound(host: str, port: int) -> socket.socket:
    """Take the port before anything is read, so that a port in use is told at once."""
    if not 0 <= port <= 65535:
        raise InputError(f"port must be 0 to 65535, got {port}.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        taken = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"There is no address {host!r} to listen on ({error}).") from None
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise BusyError(
            f"{host}:{port} cannot be listened on ({error.strerror}): another page may be there already. Choose "
            "another port, or 0 for any that is free."
        ) from None
    return taken
