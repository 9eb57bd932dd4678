"""The ASGI application: routes, request ids, cross-origin rules, the page and its files.

starlette is imported in `make_app` only: it belongs to the extra `serve`. There is no validation framework: the table
in dlmrt.serve.fields is the schema, and its errors have OpenAI's shape.

Source: ours.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlmrt import __version__
from dlmrt.serve.body import Receive
from dlmrt.serve.endpoint import CompletionsEndpoint, Send
from dlmrt.serve.openapi import docs_page, openapi_document
from dlmrt.serve.problems import ApiError, as_api_error, dumps
from dlmrt.serve.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PAGE = Path(__file__).with_name("page")
_FILES = {
    "": ("index.html", "text/html"),
    "page/style.css": ("style.css", "text/css"),
    "page/app.js": ("app.js", "text/javascript"),
    "page/canvas.js": ("canvas.js", "text/javascript"),
    "page/icon.svg": ("icon.svg", "image/svg+xml"),
}
_SECURITY = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
}
_MAX_REQUEST_ID = 128

App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def make_app(service: Service) -> App:
    """The application of `service`."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        return Response(dumps(document), status, media_type="application/json", headers=headers)

    async def health(request: Request) -> Response:
        is_ready = service.phase == "ready"
        document = {
            "status": "ok" if is_ready else "unavailable",
            "phase": service.phase,
            "model": service.config.model,
        }
        return answer(document, 200 if is_ready else 503, None if is_ready else {"retry-after": "2"})

    async def metrics(request: Request) -> Response:
        slot = service.slot
        text, content_type = service.metrics.render(
            num_running=int(slot.running is not None), num_waiting=slot.num_waiting,
            context_share=service.context_share(),
        )  # fmt: skip
        return Response(text, headers={"content-type": content_type})

    async def models(request: Request) -> Response:
        service.authorise(request.headers.get("authorization"))
        return answer({"object": "list", "data": [_model_card(service)]})

    async def model(request: Request) -> Response:
        service.authorise(request.headers.get("authorization"))
        service.check_model(request.path_params["name"])
        return answer(_model_card(service))

    async def version(request: Request) -> Response:
        return answer({"version": __version__})

    async def openapi(request: Request) -> Response:
        return answer(openapi_document(service.config.root_path))

    async def docs(request: Request) -> Response:
        return Response(docs_page(), media_type="text/html")

    async def page(request: Request) -> Response:
        name, kind = _FILES[request.url.path.removeprefix(service.config.root_path).lstrip("/")]
        return Response((PAGE / name).read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}; see /docs")
        problem = as_api_error(error)
        return answer(problem.document(), problem.status, problem.headers())

    routes = [
        Route("/v1/chat/completions", CompletionsEndpoint(service, "chat"), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(service, "completions"), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
        *(Route(f"/{path}", page) for path in _FILES),
    ]
    middleware = [Middleware(_Headers)]
    if service.config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(service.config.cors_origins), allow_methods=["GET", "POST"],
                allow_headers=["*"], expose_headers=["x-request-id", "retry-after"],
            )
        )  # fmt: skip
    handlers = {HTTPException: refuse, ApiError: refuse, Exception: refuse}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _model_card(service: Service) -> dict[str, Any]:
    card: dict[str, Any] = {"id": service.config.model, "object": "model", "created": 0, "owned_by": "dlmrt"}
    card["root"] = service.config.model  # vLLM's client reads it
    if service.phase != "ready":
        return card
    engine = service.engine
    assert engine.config.diffusion is not None
    return card | {
        "max_model_len": engine.config.max_position_embeddings,
        "diffusion": {"noise": engine.config.diffusion.noise, "settings": dict(service.default_settings())},
    }


class _Headers:
    """Adds the request id, the client's own if it sent one, and security headers to every response."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        is_usable = 0 < len(given) <= _MAX_REQUEST_ID and all(33 <= byte < 127 for byte in given)
        request_id = given if is_usable else f"req-{secrets.token_hex(12)}".encode()
        extra = [(b"x-request-id", request_id), *((k.encode(), v.encode()) for k, v in _SECURITY.items())]

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
