"""From one question to one answer: the artifact, the answer, its correction by measured rows, its reasons."""
