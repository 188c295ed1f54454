"""Process groups between trainers and engines."""
