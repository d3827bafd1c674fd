"""vLLM with the compressed KV cache of kvlathe (docs/vllm.md)."""

from __future__ import annotations


def register() -> None:
    """Register the plugin: vLLM calls it in each of its processes, perhaps twice.
    Without an engine that is named, vLLM stays as it is."""
    from kvlathe_vllm.patch import install

    install()
