"""Plain-torch stand-ins of networks that no library builds; a test holds each to its published parameter count."""
