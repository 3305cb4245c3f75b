"""From one question to one answer: which artifact answers, what it says, how measured rows correct it, why."""
