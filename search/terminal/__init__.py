"""What people and scripts see of a run: events, told as plain lines, as JSON lines or in a live view."""
