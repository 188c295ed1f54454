"""The bodies of the Tinker API, as its SDK sends and reads them."""
