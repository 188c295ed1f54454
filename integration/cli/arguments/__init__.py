"""Arguments of the commands, as they are parsed and read from files."""
