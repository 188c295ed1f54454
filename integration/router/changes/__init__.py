"""Administrative changes to all workers, and the update journal that survives a crash."""
