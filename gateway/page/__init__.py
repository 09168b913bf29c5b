"""The live page: what feeds it, who may use its button, and its files (`static/`, plain modules and CSS)."""
