"""What every search shares: its interface, the loop that prices and searches, the one objective, its bound, and least memory."""
