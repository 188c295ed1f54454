"""What an output has to look like: compiled grammars, masks, jumps."""
