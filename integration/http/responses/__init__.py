"""OpenAI's Responses API: a translation of its requests to chats, and of their answers back."""
