"""The HTTP server of a service: endpoints for RL frameworks, OpenAI clients, monitoring and debugging."""
