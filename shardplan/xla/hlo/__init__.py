"""Reads compiled HLO text: collectives, products, memory peak, schedule, rematerialization warnings."""
