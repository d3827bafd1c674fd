"""Anthropic's /v1/messages: requests become chats, and their answers content blocks."""
