"""HTTP connections of the page's server: closed if a request does not begin in time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for the request line and the headers.

    uvicorn limits the time between requests only: a client that connects and sends half of its headers would be waited
    for without end. Bodies are limited by `eigentrace.page.access.Guard`.

    Args:
        seconds: Time from the first byte, or from the connection, to the end of the headers.
        settings: The arguments that uvicorn passes to its protocols.
    """

    def __init__(self, *, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit with the connection."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; end the time limit with the headers, start it with the next request's first byte."""
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time limit with the connection."""
        super().connection_lost(exc)
        self._cancel()

    def _limit(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if not is_waiting:
            self._cancel()
        elif self._deadline is None:  # further bytes of the same headers do not extend the limit
            self._deadline = self.loop.call_later(self._seconds, self.transport.close)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
