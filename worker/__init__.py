"""The data plane: block tables, batch state, model, sampler. Never imports the scheduler."""
