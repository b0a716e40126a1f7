"""Access control of the page's server: allowed hosts, tokens, limits of requests and security headers."""

import asyncio
import hashlib
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

_log = logging.getLogger("uvicorn.error")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Largest request body: an image of 4 MiB in base64, with some text.
MOST_BYTES = 6 * 2**20
# Largest sum of the request bodies that are being received or handled at one time.
MOST_HELD = 16 * MOST_BYTES
# Time in which a request must arrive: long enough for the largest body at 1 Mbit/s.
REQUEST_SECONDS = 60.0
_READING = ("GET", "HEAD")
LOCAL = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TOO_LARGE = f"The request body is larger than {MOST_BYTES // 2**20} MiB. Send a smaller image, or fewer rows."


class _Refused(Exception):  # noqa: N818  # a signal between two functions of this module
    """A request body that is rejected while it arrives; holds the status and the message."""


class _Left(Exception):  # noqa: N818
    """The client left before its request was complete."""


class Guard:
    """ASGI middleware that rejects forbidden requests and adds security headers to every response.

    Args:
        app: The wrapped application.
        hosts: Accepted values of the Host header, with port. Others are rejected: in a DNS rebinding attack, another
            site's name resolves to this machine.
        token: The value of the X-Token header that writing requires.
        closed: Require the token for reading as well, as `?token=` in the URL or by the cookie that it sets.
        own_address: Accept the address that the request was sent to as host, too; for servers that listen on all
            addresses of the machine.
        seconds: Time in which a request body must arrive.
    """

    def __init__(
        self,
        app: App,
        hosts: Collection[str],
        token: str,
        closed: bool = False,
        own_address: bool = False,
        seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.app, self.token, self.closed = app, token, closed
        self.own_address, self.seconds = own_address, seconds
        self.held = 0  # bytes of all request bodies that are being received or handled
        self.hosts = {host.lower() for host in hosts}
        self.cookie = f"eigentrace_{_digest('name', token)[:8]}"
        self.cookie_value = _digest("cookie", token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle or reject one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = _by_name(scope["headers"])
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        has_token = self.closed and any(_are_equal(token, self.token) for token in tokens)
        send = self._with_headers(send, scope["path"], has_token)
        refusal = self._refusal(scope, headers, has_token)
        if refusal is not None:
            return await _refuse(send, *refusal)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        body = _Body(self, receive)
        try:
            await self.app(scope, receive if scope["method"] in _READING else body.receive, watched)
        except _Left:
            pass
        except _Refused as refused:
            if not started:
                await _refuse(send, *refused.args)
        except Exception:
            # Handled here, so that this response has the headers too; details go to the terminal only.
            _log.exception("A request failed: %s %s", scope["method"], scope["path"])
            if not started:
                await _refuse(send, 500, "Internal server error. See the terminal of eigentrace serve for details.")
        finally:
            self.held -= body.size

    def _refusal(self, scope: Scope, headers: dict[bytes, list[bytes]], has_token: bool) -> tuple[int, str] | None:
        """Return the status and message of a rejection; None if the request is allowed."""
        host = [value.decode("latin-1").lower() for value in headers.get(b"host", [])]
        accepted = self.hosts | ({_with_port(*scope["server"])} if self.own_address else set())
        if len(host) != 1 or host[0] not in accepted:
            return 400, (
                f"The Host header is {', '.join(host)!r}, but this server only answers to "
                f"{', '.join(sorted(accepted))}. Open the page at one of these, or start it with --allow-host."
            )
        if self.closed and not has_token and not self._has_cookie(headers):
            return 401, "The token is missing. Open the URL that eigentrace printed at start: it contains the token."
        if scope["method"] not in _READING:
            tokens = headers.get(b"x-token", [])
            if len(tokens) != 1 or not _are_equal(tokens[0].decode("latin-1"), self.token):
                return (
                    403,
                    "The token is missing or not that of this server. Reload the page: the server has restarted.",
                )
        lengths = headers.get(b"content-length", [])
        if any(not length.isdigit() or int(length[:20]) > MOST_BYTES for length in lengths):
            return 413, _TOO_LARGE
        return None

    def _has_cookie(self, headers: dict[bytes, list[bytes]]) -> bool:
        for header in headers.get(b"cookie", []):
            try:
                found = SimpleCookie(header.decode("latin-1")).get(self.cookie)
            except CookieError:
                continue
            if found is not None and _are_equal(found.value, self.cookie_value):
                return True
        return False

    def _with_headers(self, send: Send, path: str, has_token: bool) -> Send:
        added = dict(_HEADERS)
        added["Cache-Control"] = "no-cache" if path.startswith("/static/") else "no-store"
        if has_token:
            added["Set-Cookie"] = f"{self.cookie}={self.cookie_value}; HttpOnly; SameSite=Strict; Path=/"

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower().encode() for name in added}
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                ours = [(name.lower().encode(), value.encode("latin-1")) for name, value in added.items()]
                message = {**message, "headers": kept + ours}
            await send(message)

        return sending


class _Body:
    """A request body as it arrives, limited in its size, its time and the bytes that all bodies hold together."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self.guard, self.source = guard, receive
        self.size, self.is_whole = 0, False
        self.deadline = asyncio.get_running_loop().time() + guard.seconds

    async def receive(self) -> Message:
        """Return the next message of the request; raise _Refused beyond a limit, _Left if the client is gone."""
        if self.is_whole:
            return await self.source()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.source()
        except TimeoutError:
            raise _Refused(408, f"The request did not arrive within {self.guard.seconds:g} seconds.") from None
        if message["type"] == "http.disconnect":
            raise _Left
        # A body without Content-Length is checked while it arrives.
        size = len(message.get("body", b""))
        self.size += size
        self.guard.held += size
        if self.size > MOST_BYTES:
            raise _Refused(413, _TOO_LARGE)
        if self.guard.held > MOST_HELD:
            raise _Refused(503, "The server is receiving too many requests. Try again in a minute.")
        self.is_whole = not message.get("more_body", False)
        return message


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def _by_name(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        found.setdefault(name.lower(), []).append(value)
    return found


def _are_equal(given: str, expected: str) -> bool:
    """Compare in constant time, so that the time taken reveals nothing about the token."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _digest(what: str, token: str) -> str:
    return hashlib.sha256(f"eigentrace {what} {token}".encode()).hexdigest()


def hosts_of(host: str, port: int, allowed: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the accepted Host headers of a server that listens on `host` and `port`.

    Args:
        host: The address that the server listens on. If it is that of all interfaces, the machine's names are accepted.
        port: The port that it listens on.
        allowed: Additional names, such as that of a reverse proxy. A name without a port is accepted with this
            server's port and with none.
    """
    names = {*LOCAL, f"[{host}]" if ":" in host else host}
    if is_wildcard(host):
        names |= {socket.gethostname(), socket.getfqdn()}
    named = {name if ":" in name.rpartition("]")[2] else _with_port(name, port) for name in allowed}
    bare = set(allowed) | (names if port == 80 else set())
    return tuple(sorted({_with_port(name, port) for name in names} | named)) + tuple(sorted(bare - named))


def is_wildcard(host: str) -> bool:
    """Return whether a server at this address listens on all addresses of the machine."""
    return host in ("", "0.0.0.0", "::")  # compared, not bound


def _with_port(name: str, port: int) -> str:
    return f"[{name}]:{port}" if ":" in name and not name.startswith("[") else f"{name}:{port}"
