"""Where the bytes of a tensor lie."""
