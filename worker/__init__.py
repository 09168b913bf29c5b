"""The data plane: block tables, batch state, model and sampler of one replica. Never imports the scheduler."""
