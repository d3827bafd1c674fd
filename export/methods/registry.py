"""The registry: every method under its name, which is that of its file.

>>> method("hack").summary
'quantize full pages to 8, 4, 3 or 2 bit and compute on the codes'
>>> "hack" in methods()
True
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from kvlathe.export import methods as folder
from kvlathe.export.methods.method import Method
from kvlathe.export.methods.options import unknown


@cache
def methods() -> dict[str, Method[Any]]:
    """Every method: each file of this folder that has a METHOD, by the file's name. A
    program may add its own.

    A function, since methods and what is made of them lie in one folder: they are
    imported when the first request is read.
    """
    found: dict[str, Method[Any]] = {}
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        method = getattr(importlib.import_module(module.name), "METHOD", None)
        if isinstance(method, Method):
            found[module.name.rpartition(".")[2]] = method
    return found


def method(name: str) -> Method[Any]:
    """The method ``name``. Raises KvlatheError where there is none."""
    known = methods()
    if name not in known:
        raise unknown(f"the compression {name!r}", name, known)
    return known[name]
