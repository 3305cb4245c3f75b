"""Plain-torch stand-ins for networks that no library builds; a test checks each published parameter count."""
