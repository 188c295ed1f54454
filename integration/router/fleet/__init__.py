"""The workers of a router: their list, their health, and the choice of one for a request."""
