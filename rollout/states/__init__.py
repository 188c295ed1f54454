"""The room for recurrent states: a pool of slots, the sequences that run in them, snapshots for prefix hits."""
