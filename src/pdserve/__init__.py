"""pdserve serves large language models with prefill and decode on separate pools of workers.

A request's way through the packages: `gateway`, then `decode`, `transfer` and `prefill` (what is decided), `worker`
(the process around them), `engine` (the model), `fabric` (the writes). Start reading at `docs/architecture.md`.
"""
