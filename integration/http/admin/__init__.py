"""Administrative endpoints."""
