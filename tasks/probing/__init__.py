"""What the device at hand is and how fast it computes, and how long a few real iterations take on it."""
