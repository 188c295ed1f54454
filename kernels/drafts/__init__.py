"""The search in earlier tokens for what may come next, in C++."""
