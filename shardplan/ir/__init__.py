"""What the program is: values, ops with their traits, loops, repeated layers."""
