"""What self-contained pages need: styles and scripts from files, data, and hashes for the content security policy."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from sparsam.report.styles import style_sheet
from sparsam.runs.files import replace_file

WEB = files(__package__) / "web"


def write_page(
    destination: Path, template: str, *, styles: Sequence[str], scripts: Sequence[str], data: Any, **parts: str
) -> None:
    """Write one HTML file that asks for nothing from outside.

    Its policy names the hashes of its style and its script, so nothing else that gets into the page can run.

    Args:
        destination: The file to write.
        template: A file in web/, with $names for everything below.
        styles: CSS files in web/. The styles of methods are added.
        scripts: JavaScript files in web/, in an order in which each finds the constants of those before it.
        data: What the scripts show.
        parts: HTML for further names.
    """
    style = "\n".join([style_sheet(), *map(_read, styles)])
    script = "\n".join(['"use strict";\n(() => {', *map(_read, scripts), "})();\n"])
    policy = escape(
        f"default-src 'none'; style-src '{content_hash(style)}'; script-src '{content_hash(script)}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = Template(_read(template)).substitute(parts, policy=policy, data=embedded(data), style=style, script=script)
    replace_file(destination, page)


def _read(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def data_uri(data: bytes, media_type: str) -> str:
    """Return an address that holds the data itself.

    >>> data_uri(b"hello", "text/plain")
    'data:text/plain;base64,aGVsbG8='
    """
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
