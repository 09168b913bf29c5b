"""The default model: fetched, converted, and as good as the original in transformers."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from worker.model_store import resolve


def test_default_model_answers_like_the_original() -> None:
    folder = resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert prompt["input_ids"].shape == (1, 37)
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, 37:]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    text = "It's 2024,  naïve 日本語 😀\n\n x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
