"""kvlathe compresses the KV cache of a decoder LLM, exports it as an engine, and serves it."""

__version__ = "0.1.0"
