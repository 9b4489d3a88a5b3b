"""Workers as Ray actors: `launcher = "ray"`."""
