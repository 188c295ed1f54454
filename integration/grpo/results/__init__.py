"""Files of a run: its metrics, its checkpoints, and the one owner of its folder."""
