"""HTTP: a request from its route and key to its stored answer."""
