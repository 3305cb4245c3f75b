"""Walks: a torch module followed through a forward and a backward pass without running it; the only room with torch."""
