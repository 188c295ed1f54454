"""The ledger of KV blocks: pool, prefix cache, pins, events, tensors."""
