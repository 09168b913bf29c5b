"""One module per endpoint (or pair of them): what it reads, what it answers."""
