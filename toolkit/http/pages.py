"""Pages of HTML that fetch nothing from elsewhere, and run no script but their own."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import Response


def html_page(html: str, *, images: bool = False) -> Response:
    """Answer with a page that has one <script> and one <style>, and no other code. Browsers run nothing else in it, let
    it speak to this server only, and show it in no frame. With `images` it may show those that it has as data.
    """
    policy = [
        "default-src 'none'",
        f"script-src {_hash_of('script', html)}",
        f"style-src {_hash_of('style', html)}",
        *(["img-src data: blob:"] if images else []),
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(html, media_type="text/html", headers=headers)


def _hash_of(tag: str, html: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
