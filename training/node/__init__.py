"""On the nodes: what is shipped into a run's folder and runs there. Knows neither inventory nor the laptop's side."""
