"""GET /: a page for people, which shows each token with its probability by asking this server's own API."""

import pathlib
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Response

_FOLDER = pathlib.Path(__file__).parent / "playground"
_FILES = {
    "/": ("page.html", "text/html"),
    "/playground/page.css": ("page.css", "text/css"),
    "/playground/page.js": ("page.js", "text/javascript"),
}
# The page takes nothing from elsewhere and sends nothing elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_playground_routes(app: FastAPI) -> None:
    """Register the page and its two files; they are not part of the API's description."""
    for path, (name, media_type) in _FILES.items():
        answer = _make_answer(_FOLDER / name, media_type)
        app.add_api_route(path, answer, methods=["GET"], include_in_schema=False)


def _make_answer(file: pathlib.Path, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = file.read_bytes()
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}

    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return answer
