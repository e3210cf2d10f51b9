"""Which machines exist, where they come from, and how to reach them."""
