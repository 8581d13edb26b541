"""What every search shares: its interface, the loop that prices, searches and prices again, and the plans of least memory."""
