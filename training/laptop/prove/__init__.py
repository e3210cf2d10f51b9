"""`fab prove` from your machine: the drills, and the table they come to."""
