"""The alert rules and the dashboard, generated from the metrics that the server declares: `python -m monitoring OUT`."""
