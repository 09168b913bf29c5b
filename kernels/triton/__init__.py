"""Attention and cache kernels in Triton. Importing this package compiles nothing and needs no GPU."""
