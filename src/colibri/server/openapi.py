"""`/openapi.json`: the paths and the bodies they take, as they are declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

import colibri
from colibri.server.serving import Handler

_REFERENCE = "#/components/schemas/{name}"


class Path(NamedTuple):
    """One path: its method, its handler, and the type of its body where it has one."""

    method: str
    path: str
    handler: Handler
    body: type[Any] | None = None

    @property
    def template(self) -> str:
        """The path without the kinds of its parameters."""
        return self.path.replace(":path}", "}")


def openapi(paths: Sequence[Path]) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    kinds = [path.body for path in paths if path.body is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schema_of = dict(zip(kinds, schemas, strict=True))
    described: dict[str, dict[str, Any]] = {}
    for path in paths:
        described.setdefault(path.template, {})[path.method.lower()] = _operation(path, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Colibri", "version": colibri.__version__},
        "paths": described,
        "components": {"schemas": components},
    }


def _operation(path: Path, schema_of: Mapping[type[Any], Any]) -> dict[str, Any]:
    summary = (path.handler.__doc__ or "").splitlines()[0]
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done; a stream where that was asked for."},
            "default": {"description": "Refused; the body says why, and what field is at fault."},
        },
    }
    if "{" in path.template:
        name = path.template.split("{")[1].rstrip("}")
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if path.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[path.body]}},
        }
    return operation
