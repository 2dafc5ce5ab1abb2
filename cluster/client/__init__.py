"""The client's side of the HTTP API: who asks a server, from a terminal."""
