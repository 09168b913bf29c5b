"""What crosses a process boundary: messages, codec, sockets, digest, shared configuration. Imports no torch."""
