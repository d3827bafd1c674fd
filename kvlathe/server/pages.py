"""Pages for browsers: / is a chat with the cache beside it, /docs the API's description
as a table of fields for each path. They load nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kvlathe.base.pages import STYLE

FOLDER = Path(__file__).parent
SCRIPT = "".join(
    (FOLDER / name).read_text("utf-8") for name in ("markdown.js", "chat.js")
)
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy of the chat: a browser holds the page to that. It runs this
script and no other."""
Schema = dict[str, Any]


def chat_page(model: str) -> str:
    """HTML of the chat with the served ``model``."""
    style = STYLE + (FOLDER / "chat.css").read_text("utf-8")
    return _template("chat.html.j2").render(
        model=model, style=Markup(style), script=Markup(SCRIPT)
    )


def docs_page(api: Schema) -> str:
    """HTML of an OpenAPI document."""
    operations = [
        operation(api, method.upper(), path, said)
        for path, methods in api["paths"].items()
        for method, said in methods.items()
    ]
    template = _template("docs.html.j2", trim_blocks=True)
    return template.render(info=api["info"], operations=operations, style=Markup(STYLE))


def _template(name: str, trim_blocks: bool = False) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=trim_blocks)
    return environment.from_string((FOLDER / name).read_text("utf-8"))


def operation(api: Schema, method: str, path: str, said: Schema) -> Schema:
    """One path and method, as the template shows it."""
    content = said.get("requestBody", {}).get("content", {})
    body = resolved(api, content.get("application/json", {}).get("schema", {}))
    required = body.get("required", [])
    fields = [
        {
            "name": name,
            "type": type_of(api, schema),
            "required": name in required,
            "description": schema.get("description", ""),
        }
        for name, schema in body.get("properties", {}).items()
    ]
    statuses = [
        (status, response.get("description", ""))
        for status, response in said.get("responses", {}).items()
    ]
    return {
        "method": method,
        "path": path,
        "description": said.get("description") or said.get("summary", ""),
        "fields": fields,
        "statuses": sorted(statuses),
    }


def resolved(api: Schema, schema: Schema) -> Schema:
    """The schema that a reference names, or the schema itself."""
    if "$ref" not in schema:
        return schema
    return api["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]


def type_of(api: Schema, schema: Schema) -> str:
    """The types that a value may have, in words."""
    choices = schema.get("anyOf")
    if choices:
        names = [type_of(api, choice) for choice in choices]
        return " or ".join(dict.fromkeys(name for name in names if name != "null"))
    if schema.get("type") == "array":
        return f"list of {type_of(api, schema.get('items', {}))}"
    return resolved(api, schema).get("type", "any")
