"""Attention that a family computes with code of its own, without transformers' interface."""
