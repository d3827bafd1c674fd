"""``kvlathe-lmcache``: LMCache's own command, in a process that knows our serde.

    kvlathe-lmcache server --l2-adapter '{"type": "fs", ..., "serde": {"type": "kvlathe"}}'

LMCache looks for serdes among those that its process has registered.
"""

from __future__ import annotations


def main() -> None:
    """Registers the serde, then runs ``lmcache`` with the same arguments."""
    from lmcache.cli.main import main as lmcache

    from kvlathe_lmcache.serde import register

    register()
    lmcache()
