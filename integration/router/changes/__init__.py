"""Administrative changes to all workers, and the journal that survives a crash."""
