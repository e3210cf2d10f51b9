"""How the cloud's API is spoken: requests, answers as our own values, errors by class, retries, recordings."""
