"""Which base models there are, and one more: fab models, fab models.add."""
