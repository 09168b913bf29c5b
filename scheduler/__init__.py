"""The control plane: blocks, prefix cache, requests, batches, replicas. Imports no torch and none of the data plane."""
