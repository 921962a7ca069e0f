"""JSON-schema validators of the collections, made from the schema's types.

MongoDB refuses invalid documents, including those written with Compass or mongosh: an unknown
status, text in a numeric field. Unknown fields are accepted, so people may annotate documents.
"""

import logging
import types
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel
from pymongo.errors import OperationFailure

from agentrl.schema import (
    DBRecordData,
    DispatchedSamplingTask,
    Fork,
    InferenceService,
    Policy,
    Record,
    Run,
    SamplerInfo,
    Task,
    TurnTraining,
)
from agentrl.schema.audit import AuditEntry
from agentrl.store.database import UNAUTHORIZED, RunDatabase
from agentrl.store.documents.codec import NOT_STORED, Document, id_field
from agentrl.store.documents.packed_turns import LIST_FIELDS, WHOLE_FIELDS

logger = logging.getLogger(__name__)

STORED_MODELS: dict[str, type[BaseModel]] = {
    "runs": Run,
    "tasks": Task,
    "records": Record,
    "turns": DispatchedSamplingTask,
    "record_data": DBRecordData,
    "turn_training": TurnTraining,
    "policies": Policy,
    "inference_services": InferenceService,
    "samplers": SamplerInfo,
    "forks": Fork,
    "audit": AuditEntry,
}
_SCALARS: dict[Any, list[str]] = {
    str: ["string"],
    bool: ["bool"],
    int: ["int", "long"],
    # Compass and mongosh write 1.0 as an integer.
    float: ["double", "int", "long"],
    datetime: ["date"],
    np.ndarray: ["binData"],
    bytes: ["binData"],
    type(None): ["null"],
}
_CONTAINERS: dict[Any, str] = {list: "array", tuple: "array", dict: "object", Mapping: "object"}
_BLOB: Document = {"bsonType": "object", "required": ["blob"]}
_LEVEL = "moderate"
"""A document that was invalid before the validator existed may still be updated."""


def validator(collection: str) -> Document:
    """Return the `$jsonSchema` of a collection's documents."""
    model = STORED_MODELS[collection]
    schema = _object_schema(model)
    for name in NOT_STORED.get(model, ()):
        del schema["properties"][name]
    own_id = id_field(model)
    schema["properties"]["_id"] = schema["properties"].pop(own_id)
    schema["required"] = ["_id", *(name for name in schema.get("required", []) if name != own_id)]
    if collection == "turns":
        for name in WHOLE_FIELDS:
            schema["properties"][name] = {"anyOf": [schema["properties"][name], _BLOB]}
        for name in LIST_FIELDS:
            field = schema["properties"][name]
            field["items"] = {"anyOf": [field["items"], _BLOB]}
    return {"$jsonSchema": schema}


async def ensure_validators(database: RunDatabase) -> None:
    """Set the validator of every collection; if all are up to date, this is one read."""
    existing = await database.collections()
    for collection in STORED_MODELS:
        name, expected = database.stored_name(collection), validator(collection)
        if name not in existing and await database.create_collection(
            name, validator=expected, validationLevel=_LEVEL
        ):
            continue
        current = existing.get(name, {})
        if (current.get("validator"), current.get("validationLevel")) != (expected, _LEVEL):
            await _replace(database, name, expected)


async def _replace(database: RunDatabase, name: str, expected: Document) -> None:
    try:
        await database.handle.command("collMod", name, validator=expected, validationLevel=_LEVEL)
    except OperationFailure as error:
        if error.code != UNAUTHORIZED:
            raise
        logger.warning(
            "cannot update the validator of collection %s: the login lacks the role dbAdmin", name
        )


def _object_schema(model: type[BaseModel]) -> Document:
    fields = model.model_fields
    schema: Document = {
        "bsonType": "object",
        "properties": {
            name: _schema(field.annotation) for name, field in fields.items() if not field.exclude
        },
    }
    required = [name for name, field in fields.items() if field.is_required()]
    return {**schema, "required": required} if required else schema


def _schema(annotation: Any) -> Document:
    """Return the schema of one field's type; an empty schema accepts any value."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _SCALARS:
        return {"bsonType": list(_SCALARS[annotation])}
    if origin is Annotated:
        return _schema(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _any_of([_schema(argument) for argument in arguments])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _object_schema(annotation)
    if origin in _CONTAINERS:
        return _container_schema(_CONTAINERS[origin], arguments)
    return {}


def _container_schema(kind: str, arguments: tuple[Any, ...]) -> Document:
    if kind == "object":
        values = _schema(arguments[1])
        return {"bsonType": "object", **({"additionalProperties": values} if values else {})}
    return {"bsonType": "array", "items": _schema(arguments[0])}


def _any_of(choices: list[Document]) -> Document:
    if {} in choices:
        return {}
    if all(set(choice) == {"bsonType"} for choice in choices):
        kinds = [kind for choice in choices for kind in _bson_types(choice)]
        return {"bsonType": list(dict.fromkeys(kinds))}
    return {"anyOf": choices}


def _bson_types(choice: Document) -> list[str]:
    kinds = choice["bsonType"]
    return kinds if isinstance(kinds, list) else [kinds]
