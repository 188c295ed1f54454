"""The HTTP surface of a service: what RL frameworks, OpenAI clients and a person debugging expect."""
