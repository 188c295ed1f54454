"""The workers of a router: who they are, whether they live, which one gets a request."""
