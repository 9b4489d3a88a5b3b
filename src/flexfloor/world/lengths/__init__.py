"""What is known about lengths of responses: history, forecasts, and how good they were."""
