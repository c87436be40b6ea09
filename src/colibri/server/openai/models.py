"""`/v1/models`, and `/v1/embeddings`, which there are none of."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from colibri.server.problems import Problem
from colibri.server.serving import Call


async def models(call: Call) -> ASGIApp:
    """List the model under each of its names."""
    names = call.serving.model.names
    return JSONResponse({"object": "list", "data": [_model(call, name) for name in names]})


async def model(call: Call) -> ASGIApp:
    """Describe the model."""
    name = call.request.path_params["name"]
    call.serving.model.check_name(name)
    return JSONResponse(_model(call, name))


def _model(call: Call, name: str) -> dict[str, Any]:
    ready = call.serving.engine.ready
    return {
        "id": name,
        "object": "model",
        "created": call.serving.model.created,
        "owned_by": "colibri",
        "max_model_len": None if ready is None else ready.context_length,
    }


async def embeddings(call: Call) -> ASGIApp:
    """Refuse: these models make none."""
    message = "this server makes no embeddings: ask a server that holds an embedding model"
    raise Problem(501, message, None, "not_implemented")
