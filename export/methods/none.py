"""none: the uncompressed model. What every ratio is taken against."""

from __future__ import annotations

from kvlathe.export.methods.method import Method
from kvlathe.export.methods.options import NoOptions

METHOD = Method("nothing is removed", NoOptions())
