"""Refunds the charge of an HTTP request once its answer has been sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.toolkit.http.budget import BILL, Bill

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Billing:
    """ASGI middleware: opens a bill for every HTTP request and settles it, however the request ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bill = Bill()
        token = BILL.set(bill)
        try:
            await self._app(scope, receive, send)
        finally:
            BILL.reset(token)
            bill.settle()
