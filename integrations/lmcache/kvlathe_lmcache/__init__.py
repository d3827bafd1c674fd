"""LMCache with the codec of kvlathe (docs/lmcache.md)."""
