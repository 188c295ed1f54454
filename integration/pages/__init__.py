"""Pages for a browser, each of one file that loads nothing."""
