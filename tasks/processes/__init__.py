"""The process of a rank: started by a fork server or an interpreter, watched, and ended with all its children."""
