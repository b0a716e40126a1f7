"""Access control of the page's server: allowed hosts, tokens, size limits and security headers."""

import hashlib
import hmac
import json
import logging
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


class _TooLarge(Exception):  # noqa: N818  # a signal between two functions of this module
    """The request body exceeds the size limit."""


class Guard:
    """ASGI middleware that rejects forbidden requests and adds security headers to every response.

    Args:
        app: The wrapped application.
        hosts: Accepted values of the Host header, with port. Others are rejected: in a DNS rebinding attack, another
            site's name resolves to this machine.
        token: The value of the X-Token header that writing requires.
        closed: Require the token for reading as well, as `?token=` in the URL or by the cookie that it sets.
    """

    def __init__(self, app: App, hosts: Collection[str], token: str, closed: bool = False) -> None:
        self.app, self.token, self.closed = app, token, closed
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

        try:
            await self.app(scope, _limited(receive), watched)
        except _TooLarge:
            if not started:
                await _refuse(send, 413, _TOO_LARGE)
        except Exception:
            # Handled here, so that this response has the headers too; details go to the terminal only.
            _log.exception("A request failed: %s %s", scope["method"], scope["path"])
            if not started:
                await _refuse(send, 500, "Internal server error. See the terminal of eigentrace serve for details.")

    def _refusal(self, scope: Scope, headers: dict[bytes, list[bytes]], has_token: bool) -> tuple[int, str] | None:
        """Return the status and message of a rejection; None if the request is allowed."""
        host = [value.decode("latin-1").lower() for value in headers.get(b"host", [])]
        if len(host) != 1 or host[0] not in self.hosts:
            return 400, (
                f"The Host header is {', '.join(host)!r}, but this server only answers to "
                f"{', '.join(sorted(self.hosts))}. Open the page at one of these."
            )
        if self.closed and not has_token and not self._has_cookie(headers):
            return 401, "The token is missing. Open the URL that eigentrace printed at start: it contains the token."
        if scope["method"] not in ("GET", "HEAD"):
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


def _limited(receive: Receive) -> Receive:
    """Raise _TooLarge once a body, which may have no Content-Length, exceeds the limit."""
    total = 0

    async def receiving() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MOST_BYTES:
            raise _TooLarge
        return message

    return receiving


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


def hosts_of(host: str, port: int) -> tuple[str, ...]:
    """Return the accepted Host headers of a server that listens on `host` and `port`."""
    names = {*LOCAL, f"[{host}]" if ":" in host else host}
    return tuple(sorted(f"{name}:{port}" for name in names) + (sorted(names) if port == 80 else []))
