"""What self-contained pages need: data inside elements, and hashes for the content security policy."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any


def content_hash(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded(data: Any) -> str:
    """Write JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def data_uri(data: bytes, kind: str) -> str:
    """Return an address that holds the data itself.

    >>> data_uri(b"hello", "text/plain")
    'data:text/plain;base64,aGVsbG8='
    """
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
