"""An ingress at its end: it takes nothing new, and the streams that it has begun go on."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api_error import ApiError
from cluster.monitoring.ingress_metrics import IngressMetrics


class IngressDrain:
    """One per ingress, on its event loop."""

    def __init__(self, metrics: IngressMetrics) -> None:
        self._metrics = metrics
        self.is_draining = False
        self.num_open = 0  # requests that send something to the API, the streams of their answers included

    def begin(self) -> None:
        """From now on new requests are refused. Mutates."""
        self.is_draining = True

    def counting(self, app: ASGIApp) -> ASGIApp:
        """The app, with its API requests counted while they are open: until the last byte has been handed over."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            is_counted = scope["type"] == "http" and scope["method"] == "POST"
            self.num_open += is_counted
            try:
                await app(scope, receive, send)
            finally:
                self.num_open -= is_counted

        return counted

    def check_accepting(self) -> None:
        """Raises ApiError once the drain has begun."""
        if self.is_draining:
            self._metrics.rejected("draining")
            raise ApiError(503, "this server is being stopped; try again later", code="unavailable", retry_after_s=1.0)
