"""Text to tokens and back: the tokenizer, the chat template, detokenizing as tokens come, stop strings.

Knows no requests, sampling or HTTP. Start with `tokenizer`.
"""
