"""Grammars that constrain outputs: compilation, masks, jumps."""
