"""What runs in the next forward pass: continuous batching, chunked prefill, pages and preemption.

Knows sequences and pages, not requests, handoffs or tensors; takes the time and events, returns batches and outcomes.
Start with `scheduler`, then `prefill_queue` for the order of prompts and `drafts` for guesses; `batch` is what the
executor sees.
"""
