"""`python -m bench control`: what the scheduler itself costs, without a model, beside vLLM's."""
