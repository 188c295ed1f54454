"""Anthropic's Messages API: its requests are read as chats, and the answers of these are written as messages."""
