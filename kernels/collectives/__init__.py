"""Exchanges of tensors between processes of one host."""
