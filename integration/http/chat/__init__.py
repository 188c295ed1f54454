"""Template, tools and messages of conversations."""
