"""Load and experiment harness: measures servers from outside, as a client sees them. No server imports it."""
