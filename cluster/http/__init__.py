"""HTTP: the app, its middleware, bodies in, answers and events out, the published schema."""
