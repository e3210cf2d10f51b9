"""On your machine: make, start, resume, follow and fetch runs; what the tasks are made of."""
