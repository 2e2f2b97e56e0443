"""Alert rules and dashboard, generated from the metrics that the server declares: `python -m monitoring OUT`."""
