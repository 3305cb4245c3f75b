"""How the process of a rank is started, forked from a warm one, watched, and ended with all its children."""
