"""The OpenAPI document, and a page that shows it without loading anything from elsewhere.

Source: ours; OpenAPI 3.1.
"""

from __future__ import annotations

import html
import re
from typing import Any

from dlmrt import __version__
from dlmrt.serve.fields import HONOURED, NEUTRAL, NO_EFFECT, REFUSED, TOP_LEVEL_SETTINGS, Endpoint, schema

_ROUTES: dict[tuple[str, str], str] = {
    ("post", "/v1/chat/completions"): "Answer a conversation, at once or as a stream of events.",
    ("post", "/v1/completions"): "Continue a prompt, at once or as a stream of events.",
    ("get", "/v1/models"): "The served model with its default decode settings.",
    ("get", "/v1/models/{model}"): "The same model by one of its names.",
    ("get", "/health"): "200 when requests can be answered, else 503 with the phase.",
    ("get", "/metrics"): "Prometheus metrics.",
    ("get", "/version"): "Version of the server.",
    ("get", "/"): "A page to watch the canvas resolve.",
}
_STATUSES = {
    400: "a field cannot be used; `error.param` names it",
    401: "the API key is missing or wrong",
    404: "no such model or route",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "a page sent something else than JSON",
    429: "the queue is full; see Retry-After",
    500: "the request failed, the next one starts clean",
    503: "loading, shutting down, or waited too long; see Retry-After",
}


def openapi_document(root_path: str) -> dict[str, Any]:
    """The document of /openapi.json."""
    paths: dict[str, Any] = {}
    for (method, path), summary in _ROUTES.items():
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "OK"}}}
        if method == "post":
            endpoint: Endpoint = "chat" if "chat" in path else "completions"
            content = {"application/json": {"schema": schema(endpoint)}}
            operation["requestBody"] = {"required": True, "content": content}
            operation["responses"] |= {str(status): {"description": says} for status, says in _STATUSES.items()}
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "dlmrt", "version": __version__, "description": "One request at a time."},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
    }


def docs_page() -> str:
    """Routes, fields and statuses as HTML."""
    routes = _rows((f"{method.upper()} {path}", says) for (method, path), says in _ROUTES.items())
    honoured = _rows((name, field.says) for name, field in HONOURED.items())
    settings = f"<p>Decode settings, here or under <code>diffusion</code>: {_codes(TOP_LEVEL_SETTINGS)}.</p>"
    neutral = _rows((name, f"accepted: {' or '.join(map(repr, values))}") for name, values in NEUTRAL.items())
    refused = _rows(REFUSED.items())
    statuses = _rows((str(status), says) for status, says in _STATUSES.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>dlmrt API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="page/icon.svg" type="image/svg+xml">'
        '<link rel="stylesheet" href="page/style.css"></head><body class="docs"><main>'
        f'<h1>dlmrt {__version__}</h1><p><a href="./">Page</a> &middot; <a href="openapi.json">OpenAPI document</a></p>'
        f"<h2>Routes</h2>{routes}<h2>Request fields</h2>{honoured}{settings}"
        f"<h2>Accepted where they change nothing</h2>{neutral}<p>No effect on the answer: {_codes(NO_EFFECT)}.</p>"
        f"<h2>Refused</h2>{refused}<p>Any other key is refused by name.</p><h2>Statuses</h2>{statuses}"
        "</main></body></html>"
    )


def _rows(pairs: Any) -> str:
    cells = "".join(
        f"<tr><th scope=row><code>{html.escape(name)}</code></th><td>{_text(says)}</td></tr>" for name, says in pairs
    )
    return f"<table>{cells}</table>"


def _text(markdown: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(markdown))


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"<code>{html.escape(name)}</code>" for name in names)
