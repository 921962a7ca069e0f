"""The OpenAPI description of a server in this package, generated from its request checks.

Input: routes, and for each body the JSON schema of its checks. Output: the document of
`/openapi.json`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.routing import Route

PATH = "/openapi.json"
Schema = dict[str, Any]
_SCHEMA_PREFIX = "#/components/schemas/"
_RESPONSES = {
    "200": {"description": "Done."},
    "400": {"description": "The request is invalid; the error message gives the reason."},
}


def description(title: str, routes: Iterable[Route], bodies: Mapping[str, Schema]) -> Schema:
    """Return the description of some routes.

    Args:
        title: the server's name.
        routes: the server's routes.
        bodies: schemas of request bodies, by path; any object if there is none.
    """
    paths: dict[str, Schema] = {}
    schemas: Schema = {}
    for route in routes:
        # Starlette writes `{name:path}` for a parameter that may contain slashes.
        path = route.path_format
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation: Schema = {
                "operationId": f"{method} {path}",
                "parameters": [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in route.param_convertors
                ],
                "responses": _RESPONSES,
            }
            if method in ("POST", "PUT"):
                schema = dict(bodies.get(path, {"type": "object"}))
                schemas |= schema.pop("$defs", {})
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def schema_of(model: type[BaseModel]) -> Schema:
    """Return the schema of the model that checks a body."""
    return model.model_json_schema(ref_template=f"{_SCHEMA_PREFIX}{{model}}")


def fields_of(schema: Schema, names: Iterable[str]) -> Schema:
    """Return the schemas of some fields of an object."""
    properties: Schema = schema["properties"]
    return {name: properties[name] for name in names if name in properties}
