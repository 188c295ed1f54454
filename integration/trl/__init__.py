"""Rollouts for TRL's GRPOTrainer, drawn with the very module that it trains."""
