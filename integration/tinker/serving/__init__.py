"""The HTTP server of the Tinker API: sessions, the order of requests, and the thread that trains and samples."""
