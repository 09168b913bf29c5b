"""The parts of a Llama-family network: linear layers, rotary embedding, and the small operations between them."""
