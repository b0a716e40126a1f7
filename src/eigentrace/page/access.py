"""What stands between the network and the page: who may ask, how much may be sent, what a browser may do with it."""

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

# An image of 4 MiB in base64, and some words around it.
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
_TOO_LARGE = f"More than {MOST_BYTES // 2**20} MiB were sent, which is refused. Send a smaller image, or fewer rows."


class _TooLarge(Exception):  # noqa: N818  # a signal between two functions of this module
    """More was sent than is read."""


class Guard:
    """Wraps the application: refuses before anything of it runs, and adds headers to everything that is answered.

    Args:
        app: What is wrapped.
        hosts: What a browser may call this server, port included; other names are refused, since a foreign page can
            make its own name point here.
        token: What writing needs in the header X-Token.
        closed: Refuse reading as well, unless the address carries `?token=`, or the cookie that is given in turn.
    """

    def __init__(self, app: App, hosts: Collection[str], token: str, closed: bool = False) -> None:
        self.app, self.token, self.closed = app, token, closed
        self.hosts = {host.lower() for host in hosts}
        self.cookie = f"eigentrace_{_digest('name', token)[:8]}"
        self.pass_word = _digest("cookie", token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        given = _by_name(scope["headers"])
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        greeted = self.closed and any(_same(word, self.token) for word in asked)
        send = self._with_headers(send, scope["path"], greeted)
        refusal = self._refusal(scope, given, greeted)
        if refusal is not None:
            return await _refuse(send, *refusal)
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, _counted(receive), watched)
        except _TooLarge:
            if not started:
                await _refuse(send, 413, _TOO_LARGE)
        except Exception:
            # Handled here, so that this answer has the headers too; what happened is for the terminal alone.
            _log.exception("A request failed: %s %s", scope["method"], scope["path"])
            if not started:
                await _refuse(send, 500, "The server failed on this request. Its terminal says why.")

    def _refusal(self, scope: Scope, given: dict[bytes, list[bytes]], greeted: bool) -> tuple[int, str] | None:
        host = [value.decode("latin-1").lower() for value in given.get(b"host", [])]
        if len(host) != 1 or host[0] not in self.hosts:
            return 400, f"This server answers to {', '.join(sorted(self.hosts))}, and was called {', '.join(host)!r}."
        if self.closed and not greeted and not self._is_known(given):
            return 401, "Open the address that eigentrace printed when it started: it carries the token."
        if scope["method"] not in ("GET", "HEAD"):
            tokens = given.get(b"x-token", [])
            if len(tokens) != 1 or not _same(tokens[0].decode("latin-1"), self.token):
                return 403, "Writing needs the token of this server. Reload the page: the server was started anew."
        lengths = given.get(b"content-length", [])
        if any(not length.isdigit() or int(length[:20]) > MOST_BYTES for length in lengths):
            return 413, _TOO_LARGE
        return None

    def _is_known(self, given: dict[bytes, list[bytes]]) -> bool:
        for header in given.get(b"cookie", []):
            try:
                found = SimpleCookie(header.decode("latin-1")).get(self.cookie)
            except CookieError:
                continue
            if found is not None and _same(found.value, self.pass_word):
                return True
        return False

    def _with_headers(self, send: Send, path: str, greeted: bool) -> Send:
        added = dict(_HEADERS)
        added["Cache-Control"] = "no-cache" if path.startswith("/static/") else "no-store"
        if greeted:
            added["Set-Cookie"] = f"{self.cookie}={self.pass_word}; HttpOnly; SameSite=Strict; Path=/"

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower().encode() for name in added}
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                ours = [(name.lower().encode(), value.encode("latin-1")) for name, value in added.items()]
                message = {**message, "headers": kept + ours}
            await send(message)

        return sending


def _counted(receive: Receive) -> Receive:
    """Stop reading what has no length as soon as it is too much."""
    total = 0

    async def receiving() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MOST_BYTES:
            raise _TooLarge
        return message

    return receiving


async def _refuse(send: Send, status: int, words: str) -> None:
    body = json.dumps({"error": words}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def _by_name(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        found.setdefault(name.lower(), []).append(value)
    return found


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _digest(what: str, token: str) -> str:
    return hashlib.sha256(f"eigentrace {what} {token}".encode()).hexdigest()


def hosts_of(host: str, port: int) -> tuple[str, ...]:
    """Return what browsers may call a server that listens on a host and a port."""
    names = {*LOCAL, f"[{host}]" if ":" in host else host}
    return tuple(sorted(f"{name}:{port}" for name in names) + (sorted(names) if port == 80 else []))
