"""The HTTP front door: OpenAI's API, tokenising, metrics. A client of the scheduler like any other; loads no torch."""
