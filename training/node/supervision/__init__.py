"""On the head and around every rank: start them, watch them, say why they ended."""
