"""The routes of vLLM's wire."""
