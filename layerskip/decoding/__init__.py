"""The decode loop, its clock, its numbers and its text."""
