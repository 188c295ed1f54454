"""Environments of several turns: functions of the user that talk to the model, and are given episodes' rewards."""
